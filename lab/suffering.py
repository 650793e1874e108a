"""Who suffers when an engine does what no table lists, decided by clients' answers and the engine's tables alone.

A request that never ends, drained for as long as it takes, and that stood still for a while as it was watched; blocks
that nobody gets back. That a finding tells it is asked of the event stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from .lab_watch import FoundCode
from .truth.episode_end import EpisodeEnd

STANDS_S: Final = 60.0
"""A request that stands still for so long, and for STANDS_STEPS, suffers: twice the longest bar of a harm."""
STANDS_STEPS: Final = 6.0
HELD_SHARE: Final = 0.25


class Suffering(msgspec.Struct):
    """What a drawn change of behaviour does, and who suffers.

    requests: that stand still and never end. held: the share of the pool that ended requests hold for good. unnamed:
    requests that no finding names. silent: there is harm, and no finding at all.
    """

    mutation: str
    requests: list[str]
    held: float
    unnamed: list[str]
    silent: bool


def suffering_of(end: EpisodeEnd, found: Sequence[FoundCode]) -> Suffering:
    """Compare the end of an episode with what the monitor found while it was watched. Of an engine that ended itself,
    nothing more comes, and nobody suffers.
    """
    bar_s = max(STANDS_S, STANDS_STEPS * end.busy_s / max(end.steps, 1))
    before_s = end.watched_s - bar_s if end.failed_s is None else -math.inf
    requests = sorted(one.id for one in end.unfinished if one.since_s <= before_s and one.place != "front-end")
    blocks = {block for kept in end.kept if kept.since_s <= before_s for block in kept.blocks}
    held = len(blocks) / end.usable_blocks
    named = {name for one in found for name in one.requests}
    harmed = bool(requests) or held >= HELD_SHARE
    return Suffering(
        mutation=end.mutation,
        requests=requests,
        held=held,
        unnamed=[name for name in requests if name not in named],
        silent=harmed and not found,
    )
