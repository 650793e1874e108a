"""From an engine's final state to harms. No threshold: one block, one request, one token of wasted work is a harm.

How large a harm is, is part of it (`size`), so that a report can show which ones a monitor misses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from .episode_end import EpisodeEnd, KeptBlocks, UnfinishedRequest

SIZED_BY_TOKENS: Final = frozenset(
    (
        "recomputed-after-preemption",
        "preempted-in-vain",
        "preempted-for-itself",
        "preempted-behind-fence",
        "prefix-missed",
        "prefix-flushed",
        "prefix-evicted",
    )
)
SIZED_BY_REQUEST_SECONDS: Final = frozenset(
    (
        "head-of-line",
        "queued-for-blocks",
        "queued-for-unfilled-blocks",
        "decode-starved",
        "capped-after-preemption",
        "fetched-while-asleep",
        "fetched-and-passed-over",
    )
)
SIZED_BY_BYTES: Final = frozenset(
    ("pool-smaller-than-planned", "graphs-outgrew", "graphs-overreserved", "advice-wrong", "memory-unnamed")
)


class Harm(msgspec.Struct, frozen=True):
    """One kind of harm in an episode.

    since_s: when it began. size: its share, 0 to 1: of the pool for blocks, of the requests for requests, of the
    computed tokens for work, of all seconds of requests for time, of the device for memory, 1 for a wrong account.
    requests, blocks: all that it concerns, or empty where it concerns the engine as a whole.
    """

    kind: str
    since_s: float
    size: float
    requests: frozenset[str] = frozenset()
    blocks: frozenset[int] = frozenset()


def decide(end: EpisodeEnd) -> list[Harm]:
    """Return what happened, one harm of each kind, in the order in which they began."""
    harms = [*_never_finish(end), *_never_freed(end), *_wasted(end)]
    if end.failed_s is not None:
        harms.append(Harm("engine-failed", end.failed_s, 1.0))
    return sorted((harm for harm in harms if harm.since_s <= end.watched_s), key=lambda harm: harm.since_s)


def decide_of_ranks(ends: Sequence[EpisodeEnd]) -> list[Harm]:
    """Return what happened in the data-parallel ranks of a server, of which one may hang while the others do not."""
    harms = [harm for end in ends for harm in decide(end)]
    if any(end.hangs_since_s is None for end in ends):
        harms = [
            msgspec.structs.replace(one, kind="rank-hangs") if one.kind == "engine-hangs" else one for one in harms
        ]
    return sorted(harms, key=lambda harm: harm.since_s)


def _never_finish(end: EpisodeEnd) -> Iterator[Harm]:
    if end.failed_s is not None:
        return
    if end.hangs_since_s is not None:
        names = frozenset(request.id for request in end.unfinished)
        yield Harm("engine-hangs", end.hangs_since_s, 1.0, names)
        return
    by_kind: dict[str, list[UnfinishedRequest]] = defaultdict(list)
    for request in end.unfinished:
        by_kind[_kind_of_wait(request, end)].append(request)
    for kind, requests in by_kind.items():
        yield Harm(
            kind,
            min(_doomed_since_s(request, end) for request in requests),
            len(requests) / max(end.asked, 1),
            frozenset(request.id for request in requests),
            frozenset(block for request in requests for block in request.blocks),
        )


def _doomed_since_s(request: UnfinishedRequest, end: EpisodeEnd) -> float:
    """Return since when it cannot finish: a prompt beyond the pool from its arrival on, however often it is tried."""
    return request.arrived_s if request.prompt_blocks > end.usable_blocks else request.since_s


def _kind_of_wait(request: UnfinishedRequest, end: EpisodeEnd) -> str:
    """Name why a request never finishes, by where it is and what it has."""
    if request.prompt_blocks > end.usable_blocks:
        return "needs-more-than-the-pool"
    if request.preempted:
        return "preempts-itself"
    if request.place == "waiting":
        if request.needs_blocks > end.usable_blocks:
            return "needs-more-than-the-pool"
        if request.needs_blocks > end.usable_blocks - sum(len(kept.blocks) for kept in end.kept):
            return "needs-more-than-is-left"
        if request.blocks and not any(other.place == "running" for other in end.unfinished):
            return "waits-with-blocks"
        return "waits-behind-another"
    if request.place == "remote":
        return "fetched-and-not-taken" if request.kv_arrived else "fetch-never-ends"
    return {
        "front-end": "never-reaches-the-scheduler",
        "ready": "ready-and-not-queued",
        "grammar": "grammar-not-taken",
        "running": "runs-without-tokens",
        "lost": "in-no-queue",
    }[request.place]


def _never_freed(end: EpisodeEnd) -> Iterator[Harm]:
    by_kind: dict[str, list[KeptBlocks]] = defaultdict(list)
    for kept in end.kept:
        waits_for_step = kept.by != "nothing" or kept.step_in_flight
        if waits_for_step and (end.hangs_since_s is not None or end.failed_s is not None):
            continue  # an engine that stands still frees nothing, neither for its connector nor behind a step in flight
        if end.failure and kept.by == "nothing" and not kept.freed_by:
            continue  # the pass in which the engine failed had just taken them, and gave them to no request
        by_kind[_kind_of_hold(kept, end)].append(kept)
    for kind, all_kept in by_kind.items():
        blocks = frozenset(block for kept in all_kept for block in kept.blocks)
        names = frozenset(kept.owner for kept in all_kept if kept.owner)
        yield Harm(kind, min(kept.since_s for kept in all_kept), len(blocks) / max(end.usable_blocks, 1), names, blocks)


def _kind_of_hold(kept: KeptBlocks, end: EpisodeEnd) -> str:
    if kept.by == "connector":
        return "kept-by-connector" if end.polled else "kept-unpolled"
    if kept.by == "fetch":
        return "kept-by-fetch"
    if kept.by == "pin":
        return "pinned-for-good"
    return {"fence": "lost-behind-fence", "completed": "lost-at-end"}.get(kept.freed_by, "lost-at-abort")


def _wasted(end: EpisodeEnd) -> Iterator[Harm]:
    for seen in end.observed:
        whole = 0.0
        if seen.kind in SIZED_BY_TOKENS:
            whole = end.tokens_computed
        elif seen.kind in SIZED_BY_REQUEST_SECONDS:
            whole = end.request_s
        elif seen.kind in SIZED_BY_BYTES:
            whole = end.device_bytes
        elif seen.kind in ("freed-by-lease", "kept-until-lease", "sent-while-asleep"):
            whole = end.usable_blocks
        elif seen.kind in ("ended-together", "preempted-all"):
            whole = end.asked
        size = min(seen.amount / whole, 1.0) if whole else 1.0
        yield Harm(seen.kind, seen.first_s, size, frozenset(seen.requests), frozenset(seen.blocks))
