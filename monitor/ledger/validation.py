"""The validation switch: check every invariant of a ledger after every batch, and raise at the first broken one.

Set KVSCOPE_VALIDATE=1, or construct `EngineLedger(engine, validate=True)`. It is for tests and for hunting a defect of
kvscope: the check costs O(blocks) a batch, and a service that raises stops following the engine. In production the
finding corrupt.conservation and the gauge kvscope_conservation_difference_blocks watch the sum of the pool instead.

A ledger that lost events, or whose engine contradicted itself (an anomaly), has nothing to validate.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Final

from kvscope.monitor.events.kinds import Kind, name_of
from kvscope.monitor.events.wire import Batch
from kvscope.monitor.ledger.balance import balance_of
from kvscope.monitor.state.engine_state import EngineState
from kvscope.monitor.state.invariants import Violation, violations

VARIABLE: Final = "KVSCOPE_VALIDATE"
MAX_ERROR_EVENTS: Final = 12


class InvariantError(Exception):
    """A ledger's state is impossible although its events are complete and consistent: a defect of kvscope."""

    def __init__(self, engine: str, position: str, violation: Violation, history: list[str]) -> None:
        self.violation = violation
        self.history = history
        """The last events about the block and the request concerned, oldest first."""
        events = "".join(f"\n  {line}" for line in history) or "\n  no event is about it"
        super().__init__(f"{engine} at {position}: {violation}{events}")


def is_enabled() -> bool:
    """Whether the environment switches validation on."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def validate(engine: str, position: str, state: EngineState, recent: Iterable[Batch]) -> None:
    """Raise InvariantError if an invariant of the state is broken. `recent`: the batches that led to it."""
    for violation in _all_violations(state):
        raise InvariantError(engine, position, violation, list(_history(recent, violation))[-MAX_ERROR_EVENTS:])


def _all_violations(state: EngineState) -> Iterator[Violation]:
    yield from violations(state)
    parts = balance_of(state)
    if not parts.holds:
        yield Violation("conservation", -1, -1, f"the states add up to {parts.difference:+} blocks of the total")


def _history(recent: Iterable[Batch], violation: Violation) -> Iterator[str]:
    for batch in recent:
        for index, event in enumerate(batch.events()):
            is_about_block = violation.block in event.ids and event.kind != Kind.PROGRESSED
            if is_about_block or violation.request == event.request >= 0:
                name = name_of(Kind, event.kind)
                yield f"{batch.epoch}/{batch.sequence}/{index} {name} #{event.request} {event.args} {event.ids}"
