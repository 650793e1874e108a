"""Keyframes cut from a ledger: its books as a reader can begin from them, as an engine's drain thread cuts its own."""

from __future__ import annotations

from monitor.events import snapshot
from monitor.events.wire import Keyframe
from monitor.ledger.ledger import EngineLedger


def keyframe_of(ledger: EngineLedger) -> Keyframe | None:
    """The ledger's books after the last batch that it took in.

    None where a reader would not go on from it as the ledger does: the state is not known yet, or events were lost and
    an audit is putting it right, whose progress no keyframe carries.
    """
    if not ledger.ready or ledger.state.damaged:
        return None
    wall_minus_mono = ledger.wall(1) - 1
    return Keyframe(
        ledger.engine, ledger.epoch, ledger.sequence, ledger.state.last_step, ledger.heard_ns,
        ledger.heard_ns - wall_minus_mono, False, snapshot.dump(ledger.state),
    )  # fmt: skip
