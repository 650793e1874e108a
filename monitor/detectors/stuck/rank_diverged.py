"""stuck.rank-diverged: one data-parallel rank of a server stands still while others of it go on.

What one ledger shows is the same as in stuck.engine-stalled; only the ledgers beside it tell the two apart. Where the
ranks wait for one another in each step, all of them stop with the first: that stays stuck.engine-stalled, of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from kvscope.monitor.detectors import stuck
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.stuck.engine_stalled import DO_NOW, ENGINE_STALLED
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import listed

RANK_DIVERGED = "stuck.rank-diverged"
_CHANGE: Final = (
    "Let the load balancer ask each rank for progress by itself (kvscope's /metrics has a series for each): the"
    " server's /health answers for the front end, and the others' tokens hide the one that stands still.",
    "vLLM: upgrade to a release in which a rank that others have left behind is woken (PR #39366, #45223).",
)
_WONT_HELP: Final = (
    "Aborting its requests, or sending it fewer: it starts no step for those that come next either.",
    "Looking at the server's sums of tokens or of running requests: those of the others go on.",
)


def told_apart(judged: Judgement, siblings: Sequence[EngineLedger], settings: Settings) -> Judgement:
    """What was judged of one rank; but if it stands still and some of its server's other ranks go on, that."""
    if judged.code != ENGINE_STALLED or not judged.since_ns:
        return judged
    from_ns = judged.since_ns + settings(RANK_DIVERGED, "after_s") * 1e9
    going_on = [other for other in siblings if _stepped_ns(other) > from_ns and not _stands_still(other, settings)]
    if not going_on:
        return judged
    _, _, rank = judged.engine.rpartition("/")
    ranks = sorted(other.engine.rpartition("/")[2] for other in going_on)
    latest = max(going_on, key=_stepped_ns)
    last_ns, source = _stepped_ns(latest), judged.evidence[0].source
    stepped_at = latest.at(latest.state.places.launched)  # in the stream of that rank
    return msgspec.structs.replace(
        judged,
        code=RANK_DIVERGED,
        evidence=(
            *judged.evidence,
            Evidence("ranks_that_go_on", ", ".join(ranks), "", source, stepped_at),
            Evidence("they_went_on_for_s", round((last_ns - judged.since_ns) / 1e9, 1), "s", source, stepped_at),
            Evidence("ranks_known", 1 + len(siblings), "ranks", source, stepped_at),
        ),
        explanation=(
            f"Rank {rank} stands still, while {'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)} of the same"
            f" server {'goes' if len(ranks) == 1 else 'go'} on. {judged.explanation}"
        ),
        do_now=DO_NOW,
        change=_CHANGE,
        wont_help=_WONT_HELP,
    )


def _stepped_ns(ledger: EngineLedger) -> int:
    """When it last launched a step, or by its figures was seen to have ended one; 0 if that is not known."""
    if ledger.has_stream:
        return ledger.wall(ledger.state.launched_ns)
    moved = [later.at_ns or 0 for earlier, later in pairwise(ledger.samples) if later.steps != earlier.steps]
    return moved[-1] if moved else 0


def _stands_still(ledger: EngineLedger, settings: Settings) -> bool:
    return any(judged.code == ENGINE_STALLED and not judged.pending for judged in stuck.judge(ledger, settings))
