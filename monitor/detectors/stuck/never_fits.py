"""stuck.never-fits: a request needs more blocks than the pool has, or than a leak has left of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...base.text import clock_time, counted, duration, listed, percent
from ...contract.kinds import Cause
from ...ledger.engine_ledger import EngineLedger
from ...ledger.queue_state import Living, blocks_to_run, is_outside
from ...ledger.records import RequestState
from ..advice import MORE_ROOM, room_for
from ..detector import FromSamples, SampleNeed, Settings, StreamDetector, Threshold
from ..judgement import Alternative, Evidence, Judgement, Unless, seen
from ..leak.lost_references import leaked_blocks
from ..sample_math import FEWEST_SAMPLES, last_window, moving_pause_s, scrape_interval_s, seconds_apart
from ..shared_thresholds import LEAST_SCRAPES, LONGEST_TIMES
from .waiting_requests import watchdog_report

EMPTY_SHARE: Final = 0.02
"""The share of the pool below which it has room for anything that fits at all."""


class NeverFits(StreamDetector[Judgement]):
    """Requests that not even the empty pool has room for.

    Sees: a waiting request whose tokens, or whose failed allocation, need more blocks than the pool has.
    Confirmed when: it has waited for a second. The arithmetic excludes that others free enough.
    Likely when: blocks are missing that a connector without a lease may still return, or by the engine's count alone.
    Not when: it was admitted before and preempts itself (stuck.self-preempt); others hold the blocks for a while
    (stuck.head-of-line); all that its tokens may become would fit, and the engine asks for more.
    """

    code = "stuck.never-fits"
    severity = "error"
    title = "A request needs more blocks than the pool has"

    grace_s = Threshold(1, "s", "the arithmetic is certain. This only excludes a client that gives up at once")
    figures_grace_s = Threshold(
        30, "s", "a pause for new weights is shorter, and in one long step the queue may look like this"
    )
    sample_need = SampleNeed(6, figures_grace_s, "requests wait, none runs, and the pool is empty")
    alternatives = (
        Alternative("blocks that others hold", "it needs more than the whole pool has"),
        Unless("blocks that a connector still returns", "no connector holds any of them"),
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the requests that can never run."""
        living = ledger.living()
        yield from self._larger_than_the_pool(ledger, settings, living)
        yield from self._without_leaked(ledger, settings, living)

    def _larger_than_the_pool(self, ledger: EngineLedger, settings: Settings, living: Living) -> Iterator[Judgement]:
        state, at = ledger.state, ledger.at
        most_tokens = state.usable * state.block_size
        large = [  # most waiting requests are not, and there may be thousands
            record
            for record in living.waiting
            if record.prompt_tokens + record.output_tokens > most_tokens
            or record.blocks_to_admit > state.usable
            or record.blocks_needed > state.usable
        ]
        oversized = [record for record in large if _is_oversized(ledger, record, state.usable)]
        grace = settings(self.grace_s)
        late = [
            record
            for record in oversized
            if state.is_certain_request(record) and ledger.age_s(_waits_since(record)) >= grace
        ]
        if not oversized:
            return
        named = sorted(late or oversized, key=_waits_since)
        first = named[0]
        needed = max(_blocks_to_run(ledger, record) for record in named)
        would_fit = any(0 < max(record.blocks_to_admit, record.blocks_to_finish) <= state.usable for record in named)
        behind = [r for r in living.waiting if r is not first and r.arrived_ns >= first.arrived_ns]
        held_back = (
            f" {first.id} stands at the head of the queue and holds back {counted(len(behind), 'request')} behind it:"
            f" {listed([r.id for r in behind])}."
            if any(record.times_passed_over for record in named) and behind
            else ""
        )
        yield self.finding(
            ledger,
            pending=not late,
            since_ns=ledger.wall(_waits_since(first)),
            position=at(first.since_at if first.preemptions else first.arrived_at),
            requests=tuple(record.id for record in named),
            evidence=_fit_evidence(ledger, first, living, _blocks_to_run(ledger, first), len(behind)),
            explanation=_oversized_text(ledger, named, state.usable) + held_back,
            numbers={
                "Abort it": f"Abort {listed([record.id for record in named])}",
                "to the capacity": f"{state.usable * state.block_size}, the capacity",
                "what it needs": f"{needed + state.reserved} blocks",
                MORE_ROOM: room_for(ledger, needed + state.reserved),
            },
            missing="why the engine asks for more blocks than its tokens fill at the most" if would_fit else "",
        )

    def _without_leaked(self, ledger: EngineLedger, settings: Settings, living: Living) -> Iterator[Judgement]:
        """Yield the requests that the pool would have room for, if blocks that a leak has taken were there."""
        if not living.waiting or not any(record.cause == Cause.KV_BLOCKS for record in living.waiting):
            return
        state, at = ledger.state, ledger.at
        leaked = leaked_blocks(ledger, settings)
        if not leaked.blocks:
            return
        room = state.usable - len(leaked.blocks)
        starved = [record for record in living.waiting if room < _blocks_to_run(ledger, record) <= state.usable]
        if not starved:
            return
        first = min(starved, key=lambda record: record.arrived_ns)
        head = ledger.head()
        behind = [
            record
            for record in living.waiting
            if head in starved and record not in starved and not is_outside(record) and record.cause != Cause.KV_BLOCKS
        ]
        needed = _blocks_to_run(ledger, first)
        yield self.finding(
            ledger,
            key="leaked",
            verdict="likely" if state.damaged or not leaked.for_good else "confirmed",
            pending=ledger.age_s(first.since_ns) < settings(self.grace_s)
            or not state.is_certain_request(first)
            or not all(map(state.is_certain_block, leaked.blocks)),
            since_ns=ledger.wall(first.since_ns),
            position=at(first.since_at),
            requests=tuple(record.id for record in (*starved, *behind)),
            blocks=tuple(sorted(leaked.blocks)),
            evidence=(
                seen("blocks_needed", needed, "blocks", at(max(first.refused_at, first.arrived_at))),
                seen("blocks_usable", state.usable, "blocks", at(state.places.started)),
                seen("blocks_leaked", len(leaked.blocks), "blocks", at(state.places.pool)),
                seen("blocks_free", state.free, "blocks", at(state.places.pool)),
                seen("running", len(living.running), "requests", at(state.places.moved)),
                seen("waiting_behind", len(behind), "requests", at(state.places.moved)),
            ),
            explanation=(
                f"Request {first.id} needs {counted(needed, 'block')} at once. The pool has {state.usable:,}, of which"
                f" {len(leaked.blocks):,} belong to no live request and never become free. Without these it can never"
                f" run. {counted(len(starved) + len(behind), 'request')}"
                f" {'waits' if len(starved) + len(behind) == 1 else 'wait'} for blocks:"
                f" {listed([record.id for record in (*starved, *behind)])}."
            ),
            case="Beside a leak",
            numbers={"Abort it": f"Abort {first.id}", "the rest of the pool": f"{room:,} blocks"},
            missing=(
                "" if leaked.for_good else "the connector's lease, which it does not expose: blocks may become free"
            ),
        )


def _waits_since(record: RequestState) -> int:
    return record.since_ns if record.preemptions else record.arrived_ns


def _blocks_to_run(ledger: EngineLedger, record: RequestState) -> int:
    return blocks_to_run(ledger.state, ledger.description, record)


def _is_oversized(ledger: EngineLedger, record: RequestState, usable: int) -> bool:
    if record.blocks or _blocks_to_run(ledger, record) <= usable:
        return False
    # One that preempts itself may be admitted all the same, as before: that is stuck.self-preempt.
    return not (record.self_preemptions > 1 or (record.self_preemptions and record.cause != Cause.KV_BLOCKS))


def _oversized_text(ledger: EngineLedger, named: list[RequestState], usable: int) -> str:
    first, *others = named
    too = f" The same holds for {listed([record.id for record in others])}." if others else ""
    return (
        f"Request {first.id} ({counted(first.prompt_tokens, 'prompt token')}) needs"
        f" {counted(_blocks_to_run(ledger, first), 'block')} at once and the whole pool has {usable:,}. However long it"
        f" waits, it can never run.{too}"
    )


def _fit_evidence(
    ledger: EngineLedger, record: RequestState, living: Living, needed: int, behind: int
) -> tuple[Evidence, ...]:
    state, at = ledger.state, ledger.at
    asked = record.blocks_needed == needed  # else it follows from its tokens, which its arrival reports
    needed_at = record.refused_at if asked else record.arrived_at
    if record.preemptions and not asked:
        needed_at = max(needed_at, record.preempted_at)
    return (
        seen("blocks_needed", needed, "blocks", at(needed_at)),
        seen("blocks_usable", state.total - state.reserved, "blocks", at(state.places.started)),
        seen("prompt_tokens", record.prompt_tokens, "tokens", at(record.arrived_at)),
        seen("blocks_free", state.free, "blocks", at(state.places.pool)),
        seen("running", len(living.running), "requests", at(state.places.moved)),
        seen("waiting_behind", behind, "requests", at(state.places.moved)),
        seen(
            "times_passed_over",
            record.times_passed_over,
            "times",
            at(record.passed_over_at if record.times_passed_over else record.arrived_at),
        ),
        seen("engine_watchdog", watchdog_report((record,)), at=at(record.stalled_at) if record.stalled_ns else ""),
    )


class NeverFitsFromSamples(FromSamples, NeverFits):
    """A queue before an empty pool.

    Sees: requests wait for longer than a step, none runs, and the pool is empty.
    Cannot tell: a paused engine, or one that is frozen with an empty pool, looks the same.
    Not when: the engine counts all of them as waiting for something else than room.
    """

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the requests that wait with nothing running and an empty pool for longer than a step."""
        samples = ledger.samples
        if samples[-1].awake is False:
            return
        start = last_window(
            samples, lambda s: s.running == 0 and bool(s.waiting) and s.usage is not None and s.usage < EMPTY_SHARE
        )
        if start is None:
            return
        first, last = samples[start], samples[-1]
        waiting = last.waiting or 0
        if last.deferred and last.deferred >= waiting:
            return  # they wait for something other than room, and the engine reports it
        age = seconds_apart(first, last)
        scrapes = settings(LEAST_SCRAPES) * scrape_interval_s(samples)
        longest = settings(LONGEST_TIMES) * moving_pause_s(samples[:start])
        allowed = max(settings(self.figures_grace_s), longest, scrapes)
        if age < allowed / 4:
            return
        for_room = "not exposed" if last.deferred is None else waiting - last.deferred
        yield self.finding(
            ledger,
            verdict="cannot-tell",
            pending=age < allowed or len(samples) - start < FEWEST_SAMPLES,
            since_ns=first.at_ns or 0,
            position=first.position,
            evidence=(
                Evidence("waiting", waiting, "requests", last.source, last.position),
                Evidence("waiting_for_blocks", for_room, "requests", last.source, last.position),
                Evidence("running", 0, "requests", last.source, last.position),
                Evidence("usage", round(100 * (last.usage or 0), 1), "%", last.source, last.position),
                Evidence("duration_s", round(age, 1), "s", last.source),
                Evidence("allowed_s", round(allowed, 1), "s"),
            ),
            explanation=(
                f"Since {clock_time(first.at_ns or 0)} ({duration(age)}) {counted(waiting, 'request')} waited with"
                f" nothing running and {percent(last.usage or 0)} of the pool in use: there is room, but the engine"
                " does not admit the first of them. A request that needs more blocks than the pool has would block the"
                " queue like this. So would a paused engine (new weights, a profile) or one frozen with an empty pool."
            ),
            case="From metrics",
            missing=(
                "how many blocks the first request needs: attach the event stream (monitor doctor tcp://HOST:5757)"
                + (
                    ""
                    if last.deferred is not None
                    else "; and the reason for which requests wait (vllm:num_requests_waiting_by_reason, since vLLM"
                    " 0.20): a compiling grammar or KV being fetched looks the same"
                )
            ),
        )
