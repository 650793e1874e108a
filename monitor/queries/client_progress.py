"""Whether clients get anything: since when no token was computed while requests run or wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvscope.monitor.events.kinds import FIRST_FINISHED, EngineMode
from kvscope.monitor.events.samples import Sample
from kvscope.monitor.ledger.engine_ledger import EngineLedger

NO_PROGRESS_S: Final = 10.0
"""A shorter pause is a long prompt, a compilation or a garbage collection on most engines."""
LONGEST_STEPS: Final = 3
"""And no pause counts that is shorter than so many times the engine's longest step, or the time between two scrapes."""


def stream_progress(ledger: EngineLedger, running: int) -> tuple[str, int]:
    """Return the status of an engine that is received and has requests, and since when (wall ns) it computes nothing:
    serving (0), paused by its operator, or stuck.
    """
    state = ledger.state
    if state.mode in (EngineMode.PAUSED_ALL, EngineMode.ASLEEP) or (state.mode and not running):
        return "paused", ledger.wall(state.mode_since_ns)
    waits_ns = min(
        (record.arrived_ns or record.since_ns for record in state.requests.values() if record.status < FIRST_FINISHED),
        default=state.now_ns,
    )
    since_ns = ledger.wall(max(state.computed_ns, waits_ns, state.mode_since_ns))
    allowed_ns = max(NO_PROGRESS_S * 1e9, LONGEST_STEPS * state.longest_step_ns)
    return ("stuck", since_ns) if ledger.now_ns - since_ns > allowed_ns else ("serving", 0)


def metrics_progress(samples: Sequence[Sample]) -> tuple[str, int]:
    """Return the same of an engine that is seen through its metrics, and has requests in the last sample."""
    last = samples[-1]
    if last.awake is False:
        return "paused", last.at_ns or 0
    since_ns = at_ns = last.at_ns or 0
    longest_ns = 0
    for sample in reversed(samples):
        longest_ns = max(longest_ns, since_ns - (sample.at_ns or 0))
        if _progress_of(sample) != _progress_of(last) or not (sample.running or sample.waiting):
            break
        since_ns = sample.at_ns or 0
    if _progress_of(last) == (None, None):
        return "serving", 0  # a log, or a page that counts nothing
    allowed_ns = max(NO_PROGRESS_S * 1e9, LONGEST_STEPS * longest_ns)
    return ("stuck", since_ns) if at_ns - since_ns > allowed_ns else ("serving", 0)


def is_serving_between(samples: Sequence[Sample]) -> bool:
    """Return whether requests were served since the sample before the last, though the last has none."""
    if len(samples) < 2 or samples[-1].restarted or samples[-1].awake is False:
        return False
    before, last = samples[-2].generation_tokens, samples[-1].generation_tokens
    return before is not None and last is not None and last > before


def _progress_of(sample: Sample) -> tuple[int | None, int | None]:
    return sample.steps, sample.generation_tokens
