"""A fold of an engine's events for every figure of its pages, by the contract and not by the ledger."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from statistics import median
from typing import Any, NamedTuple

from kvscope.lab.second_fold import SecondFold
from kvscope.monitor.base.text import counted, duration, in_words
from kvscope.monitor.contract.kinds import CAUSE_OF, FIRST_FINISHED, Cause, Kind, Status
from kvscope.monitor.contract.wire import Batch, Run
from kvscope.monitor.ledger.pool_forecast import forecast_full

CLOCKS = (Kind.CLOCK, Kind.ARRIVED, Kind.STEP_LAUNCHED, Kind.STEP_COMPLETED, Kind.STARTED)
TAKES = (Kind.ALLOCATED, Kind.REUSED, Kind.PINNED)
GIVES = (Kind.RELEASED, Kind.RECLAIMED, Kind.UNPINNED)
POINT_NS = 100_000_000
JUDGED_NS = 500_000_000
FORECAST_POINTS = 600
LIFETIMES_S = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)


class Stay(NamedTuple):
    """How long a block was in use: from when, by the batch's clock and by the event's, until when."""

    block: int
    wall_ns: int
    since_ns: int
    until_ns: int


class PageFold(SecondFold):
    """The same with times: of arrivals, admissions and first tokens, of stays of blocks, and of the pool's states."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = self.mono_ns = self.wall_ns = self.judged_ns = 0
        self.arrived: dict[int, int] = {}
        self.admitted: dict[int, int] = {}
        self.first_token: dict[int, int] = {}
        self.causes: dict[int, int] = {}
        self.since: dict[int, int] = {}
        """When a request changed its status or its cause."""
        self.passed_over: Counter[int] = Counter()
        self.tokens: list[tuple[int, int, int]] = []
        """When, tokens of output and computed, at least 0.1 s apart."""
        self.points: list[tuple[int, Counter[str], Counter[str], int]] = []
        """At the same times, blocks by state, waiting requests by reason, and how many ran."""
        self.in_use: dict[int, Stay] = {}
        self.residency: list[Stay] = []
        self.evictions: list[list[int]] = []
        """Blocks of each, and how many of these were cached again."""
        self.forecast: tuple[str, str] | None = None
        self._gone: dict[int, list[int]] = {}

    def add(self, batch: Batch) -> None:
        """Fold a batch in."""
        self.wall_ns, self.mono_ns = batch.wall_ns, batch.mono_ns
        references = Counter(self.references)
        hashes = dict(self.hashes)
        for event in batch.events():
            if event.kind in CLOCKS:
                self.now_ns = event.args[0]
            self._add_stays(event, references)
            self._add_eviction(event, hashes)
            self._add_cause(event)
        super().add(batch)
        if not self.tokens or batch.wall_ns - self.tokens[-1][0] >= POINT_NS:
            self.tokens.append((batch.wall_ns, self.sums["output_tokens"], self.sums["computed_tokens"]))
            running = sum(status == Status.RUNNING for status in self.statuses.values())
            self.points.append((batch.wall_ns, self.states(), self.reasons(), running))
        if batch.wall_ns >= self.judged_ns + JUDGED_NS:
            self.judged_ns = batch.wall_ns
            self.forecast = self._forecast()

    def _add_stays(self, event: Run, references: Counter[int]) -> None:
        change = 1 if event.kind in TAKES else -1 if event.kind in GIVES else 0
        for block in event.ids if change else ():
            if change > 0 and references[block] == 0:
                self.in_use[block] = Stay(block, self.wall_ns, self.now_ns, 0)
            references[block] += change
            if references[block] == 0 and block in self.in_use:
                self.residency.append(self.in_use.pop(block)._replace(until_ns=self.now_ns))

    def _add_eviction(self, event: Run, hashes: dict[int, int]) -> None:
        lost: list[int] = []
        if event.kind == Kind.ALLOCATED and event.args:
            lost = event.args
        elif event.kind == Kind.EVICTED:
            lost = [value for block in event.ids if (value := hashes.pop(block, 0))]
        if lost or event.kind == Kind.EVICTED:
            self.evictions.append([len(event.ids) if event.kind == Kind.EVICTED else len(lost), 0])
            self._gone |= dict.fromkeys(lost, self.evictions[-1])
        if event.kind == Kind.CACHED:
            hashes |= dict(zip(event.ids, event.args, strict=True))
            for value in event.args:
                if eviction := self._gone.pop(value, None):
                    eviction[1] += 1

    def _add_cause(self, event: Run) -> None:
        number, args = event.request, event.args
        if event.kind == Kind.ARRIVED:
            self.arrived[number] = self.now_ns
        elif event.kind == Kind.ADMITTED:
            self.admitted.setdefault(number, self.now_ns)
            self.passed_over[number] = 0
        elif event.kind == Kind.FIRST_TOKEN:
            self.first_token.setdefault(number, self.now_ns)
        elif event.kind == Kind.NOT_SCHEDULED:
            self.passed_over[number] = args[1]
        causes: dict[int, Any] = {
            Kind.RECEIVED: Cause.NONE,
            Kind.ARRIVED: Cause.NEW,
            Kind.READY: Cause.NEW,
            Kind.ADMITTED: Cause.NONE,
            Kind.PREEMPTED: Cause.PREEMPTED,
            Kind.FINISHED: Cause.NONE,
        }
        if event.kind in causes:
            self._move(number, int(causes[event.kind]))
        elif event.kind in (Kind.QUEUED, Kind.NOT_SCHEDULED):
            self._move(number, args[0])
        elif event.kind == Kind.WAITING_ON:
            self._move(number, int(CAUSE_OF.get(args[0], Cause.NONE)))
        elif event.kind == Kind.PROGRESSED:
            half = len(event.ids)
            for each, computed, outputs in zip(event.ids, args[:half], args[half:], strict=True):
                if self.causes.get(each) and (computed, outputs) != self.progress.get(each):
                    self._move(each, Cause.NONE)

    def _move(self, number: int, cause: int) -> None:
        self.causes[number] = cause
        self.since[number] = self.now_ns

    # ---------------------------------------------------------------- what pages show

    def rates(self) -> tuple[str, str]:
        """Tokens of output, and computed, in a second of the last five."""
        recent = [point for point in self.tokens if point[0] >= self.wall_ns - 5_000_000_000]
        if len(recent) < 2:
            return "not known", "not known"
        first, last = recent[0], recent[-1]
        seconds = (last[0] - first[0]) / 1e9
        output, computed = (round((last[place] - first[place]) / seconds, 1) for place in (1, 2))
        return f"{output:,.0f} tok/s", f"{computed:,.0f} tok/s"

    def latency(self, ends: dict[int, int]) -> tuple[str, str]:
        """The 95th percentile, and the median with the requests, of those that came so far in the last five minutes."""
        since_ns = max(self.mono_ns - 300_000_000_000, 1)
        waited = sorted(end - self.arrived[number] for number, end in ends.items() if end >= since_ns)
        if not waited:
            return "none in 5 min", ""
        p50, p95 = (duration(waited[-(-len(waited) * part // 100) - 1] / 1e9) for part in (50, 95))
        return p95, f"p50 {p50}, {counted(len(waited), 'request')}"

    def alive(self) -> dict[int, int]:
        """Requests that have not ended, with their statuses."""
        return {number: status for number, status in self.statuses.items() if status < FIRST_FINISHED}

    def waiting(self) -> list[int]:
        """Those that the scheduler has, not running."""
        return [n for n, status in self.alive().items() if status not in (Status.RUNNING, Status.RECEIVED)]

    def cause_of(self, number: int) -> str:
        """Why a request waits: behind the one that was passed over last, if it has no reason of its own."""
        own = Cause(self.causes.get(number, Cause.NONE))
        outside = (Cause.REMOTE_KV, Cause.GRAMMAR, Cause.STREAMING_INPUT)
        refused = [n for n in self.waiting() if self.passed_over[n] and self.causes[n] not in outside]
        head = max(refused, key=lambda n: self.since[n], default=None)
        is_behind = number in self.waiting() and own in (Cause.NEW, Cause.PREEMPTED) and head not in (None, number)
        return "BEHIND_HEAD" if is_behind else "" if own == Cause.NONE else own.name

    def reasons(self) -> Counter[str]:
        """Waiting requests by reason."""
        return Counter(self.cause_of(number) for number in self.waiting())

    def states(self) -> Counter[str]:
        """Blocks by state: one with several holders counts under the most active."""
        holders: dict[int, list[str]] = {}
        for number, table in self.tables.items():
            status = self.statuses.get(number, int(Status.FINISHED_STOPPED))
            for block in table:
                is_deferred = block in self.deferred.get(number, ())
                ended = "finished" if is_deferred else "UNACCOUNTED"
                kind = "running" if status == Status.RUNNING else ended if status >= FIRST_FINISHED else "waiting"
                holders.setdefault(block, []).append(kind)
        for number, blocks in self.deferred.items():
            for block in blocks:
                if block not in self.tables.get(number, ()):
                    holders.setdefault(block, []).append("finished")
        counts: Counter[str] = Counter(reserved=self.reserved)
        for block in range(self.total):
            kinds = holders.get(block, [])
            if self.references[block] <= 0:
                counts["cached-idle" if self.hashes.get(block, 0) else "free"] += 1
            else:
                known = (kind for kind in ("running", "waiting", "finished") if kind in kinds)
                counts[next(known, "UNACCOUNTED")] += 1
        counts["free"] -= self.reserved
        return +counts

    def retained(self, seconds: int) -> dict[str, Any]:
        """Whatever is held, and what came of the blocks that were taken in the last seconds."""
        since_ns = self.wall_ns - seconds * 10**9
        freed = [stay for stay in self.residency if stay.wall_ns >= since_ns]
        taken = len(freed) + sum(stay.wall_ns >= since_ns for stay in self.in_use.values())
        groups = Counter(map(self._holder, self.in_use))
        suspect = sum(blocks for (_, reason), blocks in groups.items() if reason in ("FREE_DEFERRED", "UNACCOUNTED"))
        warm = {stay.block for stay in freed}
        warm = {block for block in warm if self.references[block] <= 0 and self.hashes.get(block, 0)}
        lived = Counter(bisect_left(LIFETIMES_S, (stay.until_ns - stay.since_ns) / 1e9) for stay in freed)
        return {
            "tiles": [len(self.in_use) - suspect, suspect, taken, len(freed), len(warm)],
            "held": {
                (owner, in_words(reason) if reason else "it is alive"): n for (owner, reason), n in groups.items()
            },
            "lifetimes": [lived[place] for place in range(min(lived), max(lived) + 1)] if lived else [],
        }

    def _holder(self, block: int) -> tuple[str, str]:
        """The most active request that has a block, the first of them that came, as `#number`, and why."""
        owners = [number for number, table in self.tables.items() if block in table and number in self.statuses]
        owners.sort(
            key=lambda n: (
                n not in self.alive(),
                self.statuses[n] != Status.RUNNING,
                block not in self.deferred.get(n, ()),
                n,
            )
        )
        for number in owners:
            if number in self.alive():
                return f"#{number}", self.cause_of(number)
            return f"#{number}", "FREE_DEFERRED" if block in self.deferred.get(number, ()) else "UNACCOUNTED"
        return "no known owner", "UNACCOUNTED"

    def prefixes(self) -> dict[str, Any]:
        """What the prefix cache has."""
        hashed = [block for block in range(self.total) if self.hashes.get(block, 0)]
        looked_up = self.sums["looked_up_tokens"]
        return {
            "cached": len(hashed),
            "idle": sum(self.references[block] <= 0 for block in hashed),
            "shared": sum(self.references[block] > 1 for block in range(self.total)),
            "hits": f"{100 * self.sums['hit_tokens'] / looked_up:.1f} %" if looked_up else "no lookup yet",
            "contents": len({self.hashes[block] for block in hashed}),
            "references": sum(self.references[block] for block in hashed),
            "evictions": [tuple(eviction) for eviction in self.evictions[:-51:-1]],
        }

    def _forecast(self) -> tuple[str, str] | None:
        """When lost blocks fill what living requests usually leave, by the points until now."""
        points = self.points[:: -(-len(self.points) // FORECAST_POINTS) or 1]
        live = median(states["running"] + states["waiting"] for _, states, *_ in points)
        lost = [states["finished"] + states["UNACCOUNTED"] for _, states, *_ in points]
        found = forecast_full([at / 1e9 for at, *_ in points], lost, round(self.total - self.reserved - live))
        if found is None:
            return None
        return duration(found.full_in_s), f"9 in 10: {duration(found.earliest_s)} to {duration(found.latest_s)}"
