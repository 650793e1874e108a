"""Effects of blocks that do not return."""

from __future__ import annotations

from typing import Final

from ..collapse.preempt_all import PreemptAll
from ..detector import Causes
from ..judgement import HoldsBlocks, began_later, hits_its_blocks, holds_much, holds_what_it_needs
from ..sizing.kv_too_small import KvTooSmall
from ..sizing.overload import Overload
from ..stuck.head_of_line import HeadOfLine
from ..stuck.never_fits import NeverFits
from ..stuck.parked_loads import ParkedLoads
from ..stuck.self_preempt import SelfPreempt
from ..thrash.after_retract import AfterRetract
from ..thrash.preemption_thrash import PreemptionThrash

ROOM_IS_GONE: Final = (
    Causes[HoldsBlocks]()
    .of(HeadOfLine, holds_what_it_needs)
    .of(PreemptionThrash, holds_much)
    .of(AfterRetract, holds_much)
    .of(KvTooSmall, holds_much)
    .of(Overload, began_later)
)
"""Blocks are held that others need."""
ROOM_IS_GONE_FOR_GOOD: Final = (
    ROOM_IS_GONE.of(ParkedLoads, holds_what_it_needs)
    .of(NeverFits, hits_its_blocks)
    .of(SelfPreempt, holds_much)
    .of(PreemptAll, holds_much)
)
"""Blocks are held that never return."""
