"""Keyframes cut from a ledger: its books as a reader can begin from them, as an engine's drain thread cuts its own."""

from __future__ import annotations

from kvscope.monitor.events.wire import Keyframe
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state import keyframe_codec


def keyframe_of(ledger: EngineLedger) -> Keyframe | None:
    """Return the ledger's state after the last batch that it took in, or None if the state is not known yet.

    Where events were lost and an audit is putting it right (`damaged`), who begins from it does not go on as the ledger
    does: how far the audit has come is in no keyframe.
    """
    if not ledger.ready:
        return None
    wall_minus_mono = ledger.wall(1) - 1
    return Keyframe(
        ledger.engine,
        ledger.epoch,
        ledger.sequence,
        ledger.state.last_step,
        ledger.last_received_ns,
        ledger.last_received_ns - wall_minus_mono,
        ledger.state.damaged,
        keyframe_codec.dump_state(ledger.state),
    )


def sound_keyframe_of(ledger: EngineLedger) -> Keyframe | None:
    """Return a keyframe from which a reader continues as the ledger does, or None if there is none now."""
    return None if ledger.state.damaged else keyframe_of(ledger)
