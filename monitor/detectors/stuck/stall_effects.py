"""Effects of an engine that stands still."""

from __future__ import annotations

from typing import Final

from kvscope.monitor.detectors.detector import Causes
from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.detectors.leak.deferred_free_stalled import DeferredFreeStalled
from kvscope.monitor.detectors.leak.finished_held import FinishedHeld
from kvscope.monitor.detectors.leak.remote_load_lost import RemoteLoadLost
from kvscope.monitor.detectors.stuck.front_end import FrontEndLoss
from kvscope.monitor.detectors.stuck.grammar_wait import GrammarWait
from kvscope.monitor.detectors.stuck.lost_wakeup import LostWakeup
from kvscope.monitor.detectors.stuck.promotion_starved import PromotionStarved
from kvscope.monitor.detectors.stuck.remote_load import RemoteLoad
from kvscope.monitor.detectors.stuck.zero_token import ZeroToken
from kvscope.monitor.detectors.ties import began_later

NOTHING_MOVES: Final = (
    Causes[Judgement]()
    .of(FrontEndLoss, began_later)
    .of(RemoteLoad, began_later)
    .of(LostWakeup, began_later)
    .of(GrammarWait, began_later)
    .of(PromotionStarved, began_later)
    .of(ZeroToken, began_later)
    .of(FinishedHeld, began_later)
    .of(RemoteLoadLost, began_later)
    .of(DeferredFreeStalled, began_later)
)
"""Effects of a step that does not end."""
