"""thrash.after-retract: long after a preemption far fewer run than before, though others wait and there is room."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Final

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.preemptions import LOST_EVENTS, point_at
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.events.kinds import Cause
from kvscope.monitor.ledger.engine_ledger import EngineLedger, Point
from kvscope.monitor.state.records import Preemption, RequestState
from kvscope.monitor.text import clock_time, counted, duration

APART_NS: Final = 10_000_000_000
"""Preemptions further apart than this are not of one trouble."""


def _first_of_the_last(ledger: EngineLedger) -> Preemption:
    """The first of those that the last preemption belongs to."""
    first = ledger.preempted[-1]
    for one in reversed(ledger.preempted):
        if first.at_ns - one.at_ns > APART_NS:
            break
        first = one
    return first


def _step_size(ledger: EngineLedger, since: float, until: float) -> float:
    """Tokens of output a step, between two moments of wall time; 0 where no step was made."""
    first, last = point_at(ledger, since), point_at(ledger, until)
    steps = last.steps - first.steps
    return (last.output_tokens - first.output_tokens) / steps if steps > 0 else 0.0


AFTER_RETRACT_DO_NOW: Final = (
    "Drain the engine and restart it: what it lowered at the preemption is as configured after a start.",
    "Until then, send what waits to another engine.",
)


AFTER_RETRACT_CHANGE: Final = (
    "Look for a newer release (SGLang: its issue 26248).",
    "Make preemptions rare, since each begins it anew: lower --max-num-seqs, or give the pool more"
    " (--gpu-memory-utilization, --kv-cache-memory-bytes).",
)


AFTER_RETRACT_WONT_HELP: Final = (
    "More KV memory alone: there is room now, and it is not used.",
    "A higher --max-num-seqs: that is not the limit that holds, though it is named.",
)


class AfterRetract(Detector[Judgement]):
    """Far fewer requests run long after a preemption than could."""

    code = "thrash.after-retract"
    severity = "warning"
    title = "Long after a preemption far fewer requests run than could"
    requires = ("stream",)
    position = 320

    quiet_s = Threshold(
        30, "s", "a sound engine lets one more run with each step, and is back at hundreds in as many steps"
    )
    over_s = Threshold(10, "s", "steps before and now are compared over so long")
    slower = Threshold(2, "times", "steps differ by less as prompts come and go")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the slowdown that a preemption left behind."""
        if ledger.has_stream and ledger.preempted:
            yield from self._from_stream(ledger, settings)

    def _from_stream(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
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
        before_it = max((point.running for point in _points_between(ledger, began - over_s * 1e9, began)), default=0)
        most = ledger.description.max_num_seqs
        if running >= before_it or (most and running >= most):
            return  # as many run as before, or as are allowed: each gives fewer tokens a step
        waiting = [record for record in state.requests.values() if record.is_waiting]
        before_at = str(point_at(ledger, began).position or "")
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="likely",
            pending=quiet_s < enough_s,
            since_ns=began,
            position=ledger.at(first.at),
            requests=tuple(record.id for record in waiting),
            evidence=_slowdown_evidence(ledger, head, (before, now, before_at), running, quiet_s),
            explanation=(
                f"At {clock_time(began)} requests were preempted, and since then a step gives {now:.1f} tokens of"
                f" output where it gave {before:.1f}: no more than {counted(running, 'request')} run,"
                f" {counted(len(waiting), 'request')} wait, and {counted(state.free, 'block')} are free, of which the"
                f" next needs {head.blocks_to_admit}. The last preemption was {duration(quiet_s)} ago; the caution"
                " that it made the engine take was never given up."
            ),
            do_now=AFTER_RETRACT_DO_NOW,
            change=AFTER_RETRACT_CHANGE,
            wont_help=AFTER_RETRACT_WONT_HELP,
            missing=LOST_EVENTS if state.damaged else "how many requests the engine allows itself to run at once now",
        )


def _points_between(ledger: EngineLedger, since: float, until: float) -> list[Point]:
    return [point for point in ledger.points if since <= point.at_ns <= until]


def _slowdown_evidence(
    ledger: EngineLedger, head: RequestState, sizes: tuple[float, float, str], running: int, quiet_s: float
) -> tuple[Evidence, ...]:
    state, moved = ledger.state, ledger.at(ledger.state.places.moved)
    before, now, before_at = sizes
    waiting = [record for record in state.requests.values() if record.is_waiting]
    return (
        Evidence("output_tokens_per_step_before", round(before, 2), "tokens", position=before_at),
        Evidence("output_tokens_per_step_now", round(now, 2), "tokens", position=ledger.at(state.places.progressed)),
        Evidence("max_running", running, "requests", position=moved),
        Evidence("waiting", len(waiting), "requests", position=moved),
        Evidence(
            "max_num_seqs",
            ledger.description.max_num_seqs or "not said",
            "requests",
            position=ledger.at(state.places.started),
        ),
        Evidence("blocks_free", state.free, "blocks", position=ledger.at(state.places.pool)),
        Evidence("head_blocks_needed", head.blocks_to_admit, "blocks", position=ledger.at(head.arrived_at)),
        Evidence("since_last_preemption_s", round(quiet_s, 1), "s", position=ledger.at(ledger.preempted[-1].at)),
    )
