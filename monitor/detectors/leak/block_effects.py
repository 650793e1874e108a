"""Effects of blocks that do not return."""

from __future__ import annotations

from typing import Final

from kvscope.monitor.detectors.collapse.preempt_all import PreemptAll
from kvscope.monitor.detectors.detector import Causes
from kvscope.monitor.detectors.judgement import HoldsBlocks
from kvscope.monitor.detectors.sizing.kv_too_small import KvTooSmall
from kvscope.monitor.detectors.sizing.overload import Overload
from kvscope.monitor.detectors.stuck.head_of_line import HeadOfLine
from kvscope.monitor.detectors.stuck.never_fits import NeverFits
from kvscope.monitor.detectors.stuck.parked_loads import ParkedLoads
from kvscope.monitor.detectors.stuck.self_preempt import SelfPreempt
from kvscope.monitor.detectors.thrash.after_retract import AfterRetract
from kvscope.monitor.detectors.thrash.preemption_thrash import PreemptionThrash
from kvscope.monitor.detectors.ties import began_later, hits_its_blocks, holds_much, holds_what_it_needs

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
