"""A second method for the truth: harms named from the raw events of an episode, watched and drained.

It imports neither the truth room nor the ledger nor a detector. It names the same kinds as the truth room does, from
what the engine emitted, where the truth room reads the engine's own objects. `BY_HAND` lists what events do not show.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Final

from kvscope.engine.execution.memory_plan import DEVICE_HEADROOM
from kvscope.monitor.contract.kinds import SCHEMA, Cause, Holder, Kind, Preempt, Release, Status
from kvscope.monitor.contract.wire import Run

from .cache_memory import CacheMemory
from .raw_account import NATURAL, RawAccount, RawRequest

BY_HAND: Final = frozenset(("sent-while-asleep", "fetched-while-asleep", "fetched-and-passed-over"))
"""Kinds that events do not decide: when another engine has read the blocks, or an engine fell asleep, is no event."""
STOOD_STILL_S: Final = 30.0
"""A step in flight for so long at the end, when nothing else moves, never returned."""


@dataclass
class SecondHarm:
    """A harm by events: when it began, how much in the unit of ObservedWaste, and whom it concerns."""

    first_s: float
    amount: float = 0.0
    requests: set[str] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)


class SecondTruth:
    """Harms of the recording in `directory`, of which the first `watched_s` seconds were watched.

    lease_s: how long a connector that reports no lease keeps blocks at most; 0: it does report it, has none, or its
    consumers renew it.
    """

    def __init__(self, directory: Path, watched_s: float, lease_s: float = 0.0) -> None:
        self.harms: dict[str, SecondHarm] = {}
        self.account = account = RawAccount()
        self._watched_s, self._lease_s = watched_s, lease_s
        self._cache = CacheMemory(account)
        self._lost: dict[int, tuple[int, float]] = {}
        self._outputs_before: Counter[int] = Counter()
        self._passed_over_s = 0.0
        self._ran_before, self._victims, self._preempted_s = 0, 0, 0.0
        self._ended, self._ended_of, self._ended_s = 0, 0, 0.0
        self._ran_at_pass = self._joined_in_pass = 0
        """Requests that ran as the last pass began, and how many more run since then by what passes decide."""
        self._ran_at_step: tuple[int, int] = (0, 0)
        self._left_out: list[RawRequest] = []
        """Requests that the last step gave no next token while it computed prompts, and when that was."""
        self._left_out_s = 0.0, 0.0
        self._completed_s = 0.0
        self._unfenced: list[tuple[int, int, list[int]]] = []
        """Blocks that came free though the step behind which they were freed is not complete: step, request, blocks."""
        self._wrongly_freed = False
        for event in account.replay(directory):
            self._time_passes()
            handle = getattr(self, f"_{Kind(event.kind).name.lower()}", None)
            if handle is not None:
                handle(event)
        self._time_passes()
        self._note_flushes()
        self._what_is_left()
        self.harms = {kind: harm for kind, harm in self.harms.items() if harm.first_s <= self._watched_s}

    def _note(
        self, kind: str, at_s: float, amount: float, requests: Sequence[int] = (), blocks: Sequence[int] = ()
    ) -> None:
        if at_s <= self._watched_s:
            self._note_late(kind, at_s, amount, requests, blocks)

    def _note_late(
        self, kind: str, at_s: float, amount: float, requests: Sequence[int] = (), blocks: Sequence[int] = ()
    ) -> None:
        """Note what belongs to a harm that may have begun before."""
        harm = self.harms.setdefault(kind, SecondHarm(at_s))
        harm.first_s = min(harm.first_s, at_s)
        harm.amount += amount
        harm.requests.update(self.account.name(number) for number in requests)
        harm.blocks.update(blocks)

    # ---------------------------------------------------------------- time lost in the queue

    def _time_passes(self) -> None:
        """Add up what the queue lost between the last event and this one, in the state that the last one left."""
        account = self.account
        passed_s, self._passed_over_s = account.now_s - self._passed_over_s, account.now_s
        if passed_s <= 0:
            return
        self._pass_ends()
        short = self._refused()
        if not short or self._preempted_waits_ahead():
            return
        head = max(short, key=lambda one: one.asked)
        names = [head.number]
        since_s = account.now_s - passed_s
        self._note("queued-for-blocks", since_s, len(account.waiting) * passed_s, names)
        if account.needs(head) <= account.free + account.unfilled_tokens() // account.block_size:
            self._note("queued-for-unfilled-blocks", since_s, len(account.waiting) * passed_s)
        waits_for_others = account.needs(head) <= account.usable
        behind = [one for one in account.waiting.values() if one is not head and waits_for_others]
        has_place = not account.running or len(account.running) < account.allowed_to_run
        fitting = sum(account.lacks(one) <= account.free for one in behind)
        if fitting and has_place:
            self._note("head-of-line", since_s, fitting * passed_s, names)

    def _preempted_waits_ahead(self) -> bool:
        """Whether a request went to the front of the queue that was not refused blocks since."""
        asked = (Cause.KV_BLOCKS, Cause.BEHIND_HEAD, Cause.MAX_NUM_SEQS, Cause.TOKEN_BUDGET)
        return any(one.preempted_s and one.cause not in asked for one in self.account.waiting.values())

    # ---------------------------------------------------------------- steps

    def _step_launched(self, event: Run) -> None:
        account, chosen = self.account, dict(zip(event.ids, event.args[2:], strict=True))
        self._pass_ends()
        waiting = len(account.waiting)
        if self._ended >= 2 and 2 * self._ended > self._ended_of and waiting:
            self._note("ended-together", self._ended_s, self._ended)
        if waiting or len(account.running) >= self._ended:
            self._ended = 0
        self._ran_at_pass, self._joined_in_pass = len(account.running) - self._joined_in_pass, 0
        running = [account.requests[number] for number in account.running]
        self._note_starved()
        self._left_out = []
        if any(not account.requests[number].outputs for number in chosen):
            full = sum(chosen.values()) >= account.max_tokens
            left_out = [one for one in running if one.outputs and one.number not in chosen]
            self._left_out = [one for one in left_out if one.cause == Cause.TOKEN_BUDGET or (full and not one.cause)]
        self._left_out_s = account.now_s, account.now_s - max(account.launched_s.values(), default=account.now_s)
        self._capped(len(running))

    def _note_starved(self) -> None:
        """Note requests that the last step left out, and that did not end with the step before it."""
        at_s, passed_s = self._left_out_s
        starved = [one.number for one in self._left_out if one.status < 0]
        if starved:
            self._note("decode-starved", at_s, len(starved) * passed_s, starved)

    def _capped(self, running: int) -> None:
        account = self.account
        capped = [one for one in account.waiting.values() if one.cause == Cause.MAX_NUM_SEQS]
        fits = any(account.needs(one) <= account.free for one in capped)
        before, self._ran_at_step = self._ran_at_step, (running, len(capped))
        if fits and not self._refused() and running < account.max_num_seqs and before == self._ran_at_step:
            since_s = max(account.launched_s.values(), default=account.now_s)
            self._note("capped-after-preemption", account.now_s, len(account.waiting) * (account.now_s - since_s))

    def _step_completed(self, event: Run) -> None:
        self._pass_ends()
        self._unfenced = [one for one in self._unfenced if one[0] > event.args[1]]
        self._completed_s = self.account.now_s
        free, cached_idle = event.args[4], event.args[5]
        if free >= 0 and not self._wrongly_freed and free != self.account.free:
            self._note("counters-differ", self.account.now_s, 1)
        if cached_idle >= 0 and not self._wrongly_freed and cached_idle != self.account.cached_idle:
            self._note("counters-differ", self.account.now_s, 1)

    def _pass_ends(self) -> None:
        """Note whether the pass that ends preempted all that ran."""
        if self._victims >= self._ran_before >= 2:
            self._note("preempted-all", self._preempted_s, self._victims)
        self._victims = 0

    def _finished(self, event: Run) -> None:
        if event.args[0] not in NATURAL:
            return
        account = self.account
        if account.now_s != self._ended_s or not self._ended:
            self._ended_s, self._ended, self._ended_of = account.now_s, 0, self._ran_at_pass
        self._ended += 1

    # ---------------------------------------------------------------- work done twice

    def _preempted(self, event: Run) -> None:
        if event.args[0] == Preempt.RESET:  # the operator dropped all caches: what was computed counts for nothing
            return
        account, number, beneficiary = self.account, event.request, event.args[1]
        request = account.requests[number]
        if not self._victims:
            self._ran_before, self._preempted_s = len(account.running), account.now_s
        self._victims += 1
        self._joined_in_pass -= 1
        computed = max(request.computed, event.args[3])
        lost, lost_s = self._lost.get(number, (0, account.now_s))
        self._lost[number] = max(lost, computed), lost_s
        in_vain = request.outputs == self._outputs_before[number] and computed and beneficiary != number
        if in_vain:
            self._note("preempted-in-vain", account.now_s, computed, [number])
        self._outputs_before[number] = request.outputs
        if beneficiary == number:
            self._note("preempted-for-itself", account.now_s, computed, [number])
        elif any(step in account.in_flight for step in account.fenced.values()):
            self._note("preempted-behind-fence", account.now_s, computed, [number])

    def _admitted(self, event: Run) -> None:
        start = event.args[0]
        self._joined_in_pass += 1
        lost, lost_s = self._lost.pop(event.request, (0, 0.0))
        if lost > start and self.account.now_s <= self._watched_s:
            self._note("recomputed-after-preemption", lost_s, lost - start, [event.request])

    # ---------------------------------------------------------------- blocks

    def _allocated(self, event: Run) -> None:
        account = self.account
        taken = Counter(event.ids)
        used = [block for block in taken if account.references[block] > 0 or taken[block] > 1]
        used += [block for written in account.writes.values() for block in written & taken.keys()]
        self._note_broken_fences(taken)
        if used:
            self._note("handed-out-in-use", account.now_s, len(used), blocks=used)
        self._cache.allocated(event)

    def _reused(self, event: Run) -> None:
        self._cache.reused(event)

    def _released(self, event: Run) -> None:
        self._frees(event, named=1)

    def _reclaimed(self, event: Run) -> None:
        self._frees(event, named=0)
        account = self.account
        number, _ = account.detached.get(event.ids[0], (-1, 0.0))
        fences = [account.fenced[block] for block in event.ids if block in account.fenced]
        if fences and account.fences_steps:
            self._unfenced.append((max(fences), number, [*event.ids]))

    def _note_broken_fences(self, taken: Counter[int]) -> None:
        """Note blocks that are handed out before the step completes behind which they were freed."""
        for _, number, blocks in self._unfenced:
            early = [block for block in blocks if block in taken]
            if early:
                self._note("fence-broken", self.account.now_s, len(early), [number], early)

    def _frees(self, event: Run, named: int) -> None:
        """Note blocks that are freed though nothing refers to them, or though a table still names them."""
        account = self.account
        twice = [
            block
            for block in event.ids
            if account.references[block] <= 0 or account.references[block] - 1 < account.named[block] - named
        ]
        if twice:
            self._wrongly_freed = True
            self._note("freed-twice", account.now_s, len(twice), blocks=twice)
        if event.args[0] == Release.LEASE_EXPIRED:
            number = event.request if event.request >= 0 else account.detached[event.ids[0]][0]
            self._note("freed-by-lease", account.now_s, len(event.ids), [number], event.ids)
            self._note_late("kept-until-lease", account.requests[number].ended_s, len(event.ids), [number], event.ids)

    def _completion_delivered(self, event: Run) -> None:
        request = self.account.requests[event.request]
        if self._lease_s and request.ended_s >= 0 and self.account.now_s - request.ended_s >= self._lease_s:
            blocks = sorted(+request.blocks)
            self._note("freed-by-lease", self.account.now_s, len(blocks), [event.request], blocks)
            self._note_late("kept-until-lease", request.ended_s, len(blocks), [event.request], blocks)

    def _cached(self, event: Run) -> None:
        self._cache.cached(event)

    def _evicted(self, event: Run) -> None:
        self._cache.evicted(event)

    def _memory(self, event: Run) -> None:
        """Note what the bill does not name, and an estimate or an advice that its own arithmetic refutes."""
        memory = SimpleNamespace(**dict(zip(SCHEMA[Kind.MEMORY].args, event.args, strict=True)))
        parts = [memory.weights, memory.activations_peak, memory.non_torch, memory.kv_pool]
        if min(parts) < 0 or memory.fit_requested < 0:
            return
        named, now_s = sum(parts) + max(memory.graphs_actual, 0), self.account.now_s
        if memory.used_here > named:
            self._note("memory-unnamed", now_s, memory.used_here - named)
        if now_s > 0:
            return
        more = memory.graphs_actual - max(memory.graphs_estimated, 0)
        if more > 0 and memory.device_free < DEVICE_HEADROOM:
            self._note("graphs-outgrew", now_s, more)
        elif more < 0:
            self._note("graphs-overreserved", now_s, -more)
        wrong = memory.device_free + memory.kv_pool - DEVICE_HEADROOM - memory.use_all
        if wrong:
            self._note("advice-wrong", now_s, wrong)

    def _remote_load(self, event: Run) -> None:
        """Note pins of an outer tier that remain when a fetch has ended, beyond those of fetches that go on."""
        account = self.account
        account.pinned_for.pop(event.request, None)
        left = account.outer_pins - sum(account.pinned_for.values(), Counter())
        if left:
            self._note("outer-pin", account.now_s, len(left))

    def _looked_up(self, event: Run) -> None:
        self._cache.looked_up(event)

    def _note_flushes(self) -> None:
        for loss in self._cache.losses():
            self._note(loss.kind, loss.at_s, loss.tokens, [loss.request])

    # ---------------------------------------------------------------- what is left

    def _what_is_left(self) -> None:
        account = self.account
        if not account.outer_pins:
            self.harms.pop("outer-pin", None)
        living = account.living()
        stood_s = account.last_s - max((one for one in account.launched_s.values()), default=account.last_s)
        if living and account.in_flight and stood_s > STOOD_STILL_S:
            since_s = max(self._completed_s, min(account.launched_s[step] for step in account.in_flight))
            self._note("engine-hangs", since_s, len(living), [one.number for one in living])
            self._note_kept(hangs=True)
            return
        kept = self._note_kept(hangs=False)
        for request in living:
            kind, since_s = self._why_unfinished(request, living, kept)
            self._note_late(kind, since_s, 1, [request.number], sorted(+request.blocks))

    def _why_unfinished(self, request: RawRequest, living: Sequence[RawRequest], kept: int) -> tuple[str, float]:
        account = self.account
        in_drain = sum(at_s > self._watched_s for at_s in request.preempted_s)
        if -(-request.prompt // account.block_size) * account.groups > account.usable:
            return "needs-more-than-the-pool", request.came_s
        if in_drain:
            return "preempts-itself", request.got_further_s or request.moved_s
        if request.place == "parked" and any(one.came_s <= request.came_s for one in self._refused()):
            return "waits-behind-another", request.moved_s
        if request.place == "waiting":
            needs = account.needs(request)
            if needs > account.usable:
                return "needs-more-than-the-pool", request.moved_s
            if needs > account.usable - kept:
                return "needs-more-than-is-left", request.moved_s
            if +request.blocks and not account.running:
                return "waits-with-blocks", request.moved_s
            return "waits-behind-another", request.moved_s
        if request.place == "parked":
            if request.waits_for == Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
                return "grammar-not-taken", request.moved_s
            polled = account.polls[-1][1] > self._polls_by(account.last_s - STOOD_STILL_S)
            return ("fetch-never-ends" if polled else "fetched-and-not-taken"), request.moved_s
        names = {
            "front-end": "never-reaches-the-scheduler",
            "ready": "ready-and-not-queued",
            "running": "runs-without-tokens",
            "lost": "in-no-queue",
        }
        return names[request.place], request.moved_s

    def _refused(self) -> list[RawRequest]:
        return [one for one in self.account.waiting.values() if one.cause == Cause.KV_BLOCKS]

    def _polls_by(self, at_s: float) -> int:
        return max((polls for beat_s, polls in self.account.polls if beat_s <= at_s), default=0)

    def _note_kept(self, hangs: bool) -> int:
        """Note the blocks that are referenced without a living request, and return how many there are."""
        account = self.account
        owed = +account.references
        for request in account.living():
            owed.subtract(+request.blocks)
        left = {block for block, count in owed.items() if count > 0}
        ended = [one for one in account.requests.values() if one.status >= 0]
        owners = {block: one.number for one in ended for block in +one.blocks}
        by_owner: dict[int, list[int]] = defaultdict(list)
        for block in left:
            by_owner[owners.get(block, -1)].append(block)
        for number, blocks in by_owner.items():
            kind, since_s = self._why_kept(account.requests.get(number), blocks)
            waits_for_step = any(account.fenced.get(block) in account.in_flight for block in blocks)
            if not (hangs and (waits_for_step or kind in ("kept-by-connector", "kept-unpolled", "kept-by-fetch"))):
                self._note_late(kind, since_s, len(blocks), [number] if number >= 0 else [], blocks)
        return len(left)

    def _why_kept(self, owner: RawRequest | None, blocks: Sequence[int]) -> tuple[str, float]:
        account = self.account
        if owner is None:
            since_s = min(account.detached.get(block, (-1, 0.0))[1] for block in blocks)
            return ("lost-behind-fence" if account.fenced.keys() >= set(blocks) else "pinned-for-good"), since_s
        if owner.holder == Holder.CONNECTOR and not owner.delivered:
            if owner.waits_for == Status.WAITING_FOR_REMOTE_KVS and not owner.fetch_ended:
                return "kept-by-fetch", owner.ended_s
            polled = account.polls[-1][1] > self._polls_by(self._watched_s)
            return ("kept-by-connector" if polled else "kept-unpolled"), owner.ended_s
        return ("lost-at-end" if owner.status in NATURAL else "lost-at-abort"), owner.ended_s
