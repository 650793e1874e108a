"""States to compare: as a keyframe holds them, but for the order of sets."""

from __future__ import annotations

from typing import Any

import msgspec

from kvscope.monitor.ledger import keyframe_codec
from kvscope.monitor.ledger.engine_state import EngineState
from kvscope.monitor.ledger.records import Deferral

FIELDS = keyframe_codec._StateDump.__struct_fields__
DEFERRALS = FIELDS.index("deferrals")
BLOCKS = Deferral.__struct_fields__.index("blocks")


def comparable(state: EngineState) -> list[Any]:
    """Return what a keyframe holds of the state, by position in FIELDS. A set's own order depends on what was in it
    before, which one that was read from a keyframe does not have.
    """
    dump: list[Any] = msgspec.msgpack.decode(keyframe_codec.dump_state(state))
    for deferral in dump[DEFERRALS]:
        deferral[BLOCKS] = sorted(deferral[BLOCKS])
    return dump
