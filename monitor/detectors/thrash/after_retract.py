"""thrash.after-retract: long after a preemption far fewer run than before, though others wait and there is room."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Final

from ...base.text import clock_time, counted, duration
from ...contract.kinds import Cause
from ...ledger.engine_ledger import EngineLedger
from ...ledger.records import Preemption, RequestState
from ..detector import Settings, StreamDetector, Threshold
from ..judgement import NO_ROOM, Evidence, Judgement, Unless, seen
from ..preemptions import LOST_EVENTS, point_at

APART_NS: Final = 10_000_000_000
"""Preemptions further apart than this belong to separate problems."""


def _first_of_the_last(ledger: EngineLedger) -> Preemption:
    """Return the first of those that the last preemption belongs to."""
    first = ledger.preempted[-1]
    for one in reversed(ledger.preempted):
        if first.at_ns - one.at_ns > APART_NS:
            break
        first = one
    return first


def _step_size(ledger: EngineLedger, since: float, until: float) -> float:
    """Return the output tokens of a step, between two wall times, or 0 where no step was made."""
    first, last = point_at(ledger, since), point_at(ledger, until)
    steps = last.steps - first.steps
    return (last.output_tokens - first.output_tokens) / steps if steps > 0 else 0.0


class AfterRetract(StreamDetector[Judgement]):
    """Far fewer requests run long after a preemption than could.

    Sees: since a preemption, steps give far fewer tokens, and the head of the queue waits for a place with its blocks
    free.
    Likely when: as many steps have passed as would have raised the limit again. The stream does not show that limit.
    Not when: it recovers, or as many requests run as before or as are allowed.
    """

    code = "thrash.after-retract"
    severity = "warning"
    title = "Long after a preemption, far fewer requests run than fit"
    lab_only = True

    quiet_s = Threshold(
        30, "s", "a sound engine lets one more run with each step, and is back at hundreds in as many steps"
    )
    over_s = Threshold(10, "s", "steps before and now are compared over so long")
    slower = Threshold(2, "times", "steps differ by less as prompts come and go")
    alternatives = (NO_ROOM, Unless("a lower limit set on purpose", "the limit that the engine allows itself"))

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the slowdown that a preemption left behind."""
        if not ledger.preempted:
            return
        enough_s, over_s = settings(self.quiet_s), settings(self.over_s)
        last = ledger.wall(ledger.preempted[-1].at_ns)
        quiet_s = (ledger.now_ns - last) / 1e9
        state, head = ledger.state, ledger.head()
        if head is None or quiet_s < over_s or head.cause != Cause.MAX_NUM_SEQS or head.blocks_to_admit > state.free:
            return
        first = _first_of_the_last(ledger)
        began = ledger.wall(first.at_ns)
        before = _step_size(ledger, began - over_s * 1e9, began)
        now = _step_size(ledger, ledger.now_ns - over_s * 1e9, ledger.now_ns)
        if not now or before < settings(self.slower) * now:
            return
        over = list(takewhile(lambda point: point.at_ns >= ledger.now_ns - over_s * 1e9, reversed(ledger.points)))
        half = len(over) // 2
        running = max(point.running for point in over[: half + 1])
        if running > max(point.running for point in over[half:]):
            return  # it recovers
        earlier = (point for point in ledger.points if began - over_s * 1e9 <= point.at_ns <= began)
        before_it = max((point.running for point in earlier), default=0)
        most = ledger.description.max_num_seqs
        if running >= before_it or (most and running >= most):
            return  # as many run as before, or as are allowed: each gives fewer tokens a step
        raised = point_at(ledger, ledger.now_ns).steps - point_at(ledger, last).steps
        waiting = [record for record in state.requests.values() if record.is_waiting]
        before_at = str(point_at(ledger, began).position or "")
        yield self.finding(
            ledger,
            pending=quiet_s < enough_s or raised <= running,  # raised by one with each step, the limit is beyond it
            since_ns=began,
            position=ledger.at(first.at),
            requests=tuple(record.id for record in waiting),
            evidence=_slowdown_evidence(ledger, head, (before, now, before_at), running, quiet_s),
            explanation=(
                f"Since requests were preempted at {clock_time(began)}, a step produces {now:.1f} output tokens instead"
                f" of {before:.1f}: at most {counted(running, 'request')} run and {counted(len(waiting), 'request')}"
                f" wait, although {counted(state.free, 'block')} are free and the next needs {head.blocks_to_admit}."
                f" The last preemption was {duration(quiet_s)} ago, and the engine never raised the limit that it"
                " lowered then."
            ),
            missing=LOST_EVENTS
            if state.damaged
            else ("the number of requests that the engine currently allows to run at once"),
        )


def _slowdown_evidence(
    ledger: EngineLedger, head: RequestState, sizes: tuple[float, float, str], running: int, quiet_s: float
) -> tuple[Evidence, ...]:
    state, moved = ledger.state, ledger.at(ledger.state.places.moved)
    before, now, before_at = sizes
    waiting = [record for record in state.requests.values() if record.is_waiting]
    return (
        seen("output_tokens_per_step_before", round(before, 2), "tokens", before_at),
        seen("output_tokens_per_step_now", round(now, 2), "tokens", ledger.at(state.places.progressed)),
        seen("max_running", running, "requests", moved),
        seen("waiting", len(waiting), "requests", moved),
        seen(
            "max_num_seqs", ledger.description.max_num_seqs or "not said", "requests", ledger.at(state.places.started)
        ),
        seen("blocks_free", state.free, "blocks", ledger.at(state.places.pool)),
        seen("head_blocks_needed", head.blocks_to_admit, "blocks", ledger.at(head.arrived_at)),
        seen("since_last_preemption_s", round(quiet_s, 1), "s", ledger.at(ledger.preempted[-1].at)),
    )
