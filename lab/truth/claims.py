"""Which finding codes a harm makes true: the one that names it, and others that it makes true as well.

A finding is right if a harm of the episode makes its code true. A harm is found if the code that names it is found. The
report shows separately how often one of the others was found instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from .what_happened import Harm


class Claim(NamedTuple):
    """The codes that a kind of harm makes true. `named_by` is empty for what only follows from another harm."""

    named_by: str
    also: tuple[str, ...] = ()


PREEMPTIONS_COST: Final = ("sizing.kv-too-small",)
CLAIMS: Final[dict[str, Claim]] = {
    # Blocks that are never freed, or only by a lease.
    "kept-by-connector": Claim("leak.finished-held", ("leak.rising-floor", "leak.idle-not-polled")),
    "kept-unpolled": Claim("leak.idle-not-polled", ("leak.finished-held", "leak.rising-floor")),
    "sent-while-asleep": Claim("leak.idle-not-polled", ("leak.finished-held",)),
    "kept-by-fetch": Claim("leak.remote-load-lost", ("leak.finished-held", "leak.rising-floor")),
    "lost-behind-fence": Claim("leak.deferred-free-stalled", ("leak.unaccounted", "leak.rising-floor")),
    "lost-at-end": Claim("leak.rising-floor", ("leak.unaccounted",)),
    "lost-at-abort": Claim("leak.unaccounted", ("leak.rising-floor",)),
    "freed-by-lease": Claim("leak.lease-burst", ("leak.finished-held",)),
    # Held to no purpose since its request ended, though the burst comes only when the leases end.
    "kept-until-lease": Claim("", ("leak.finished-held", "leak.rising-floor")),
    "outer-pin": Claim("leak.external-pins"),
    "pinned-for-good": Claim("leak.external-pins"),
    # Requests that never finish.
    "needs-more-than-the-pool": Claim("stuck.never-fits"),
    "needs-more-than-is-left": Claim("", ("stuck.never-fits", "stuck.head-of-line")),
    "preempts-itself": Claim("stuck.self-preempt", (*PREEMPTIONS_COST, "thrash.preemption")),
    "waits-with-blocks": Claim("stuck.parked-loads"),
    "waits-behind-another": Claim(""),
    "fetched-and-not-taken": Claim("stuck.lost-wakeup", ("stuck.remote-load",)),
    # Taken in late, when something else woke the engine: until then it was the same, and its client waited as long.
    "fetched-while-asleep": Claim("stuck.lost-wakeup", ("stuck.remote-load",)),
    # An engine that makes passes took it in late, as nothing told it.
    "fetched-and-passed-over": Claim("stuck.remote-load", ("stuck.lost-wakeup",)),
    "fetch-never-ends": Claim("stuck.remote-load"),
    "never-reaches-the-scheduler": Claim("stuck.front-end", ("stuck.lost-request",)),
    "ready-and-not-queued": Claim("stuck.promotion-starved", ("stuck.lost-request",)),
    "in-no-queue": Claim("stuck.lost-request"),
    "grammar-not-taken": Claim("stuck.grammar"),
    "runs-without-tokens": Claim("stuck.zero-token"),
    "engine-hangs": Claim("stuck.engine-stalled"),
    # Until another rank steps on, it shows no more than an engine that hangs.
    "rank-hangs": Claim("stuck.rank-diverged", ("stuck.engine-stalled",)),
    "engine-failed": Claim("", ("stuck.engine-stalled", "stuck.engine-dead")),
    # Work done twice, and time lost.
    "recomputed-after-preemption": Claim("sizing.kv-too-small"),
    "preempted-in-vain": Claim("thrash.preemption", PREEMPTIONS_COST),
    "preempted-for-itself": Claim("", ("stuck.self-preempt", "thrash.preemption", *PREEMPTIONS_COST)),
    "preempted-behind-fence": Claim("thrash.cascade", PREEMPTIONS_COST),
    "preempted-all": Claim("collapse.preempt-all", PREEMPTIONS_COST),
    "capped-after-preemption": Claim("thrash.after-retract"),
    "head-of-line": Claim("stuck.head-of-line"),
    # Any queue for blocks: only one that grows without end is an incident, which no single run shows.
    "queued-for-blocks": Claim("", ("sizing.overload",)),
    # Room for it is in blocks that others hold and do not fill. In the last block of each, there is always some.
    "queued-for-unfilled-blocks": Claim("", ("sizing.block-inflated",)),
    # Prompts took the budget of a step. It is what a wave does to who runs, and also happens without one.
    "decode-starved": Claim(""),
    "ended-together": Claim("collapse.lockstep"),
    "prefix-missed": Claim("collapse.prefix-hits"),
    "prefix-flushed": Claim("collapse.cache-flushed"),
    # A cache that is too small for its prefixes: one more block would have kept them a little longer.
    "prefix-evicted": Claim("", ("collapse.cache-flushed",)),
    # Accounts that are wrong, and memory.
    "freed-twice": Claim("corrupt.double-free", ("corrupt.counter-drift", "corrupt.conservation")),
    "handed-out-in-use": Claim("corrupt.use-after-free"),
    # Handed out before the step in flight that the engine itself keeps it for; this time that step only read it.
    "fence-broken": Claim("", ("corrupt.use-after-free",)),
    "counters-differ": Claim("corrupt.counter-drift", ("corrupt.conservation",)),
    "pool-smaller-than-planned": Claim(""),
    "graphs-outgrew": Claim("sizing.kv-too-large"),
    "graphs-overreserved": Claim("sizing.overreserved"),
    "advice-wrong": Claim("sizing.bad-suggestion"),
    "memory-unnamed": Claim("sizing.elsewhere"),
}

_HELD, _WAITS = ("harm.held-blocks",), ("harm.unserved", "harm.overtaken")
HARM_CLAIMS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("kept-by-connector", "kept-unpolled", "sent-while-asleep", "kept-by-fetch"), _HELD),
    **dict.fromkeys(("lost-behind-fence", "lost-at-end", "lost-at-abort", "freed-by-lease", "kept-until-lease"), _HELD),
    **dict.fromkeys(("outer-pin", "pinned-for-good"), _HELD),
    **dict.fromkeys(("waits-with-blocks", "fetch-never-ends", "fetched-and-not-taken"), (*_HELD, *_WAITS)),
    **dict.fromkeys(("needs-more-than-the-pool", "needs-more-than-is-left", "waits-behind-another"), _WAITS),
    **dict.fromkeys(("ready-and-not-queued", "in-no-queue", "head-of-line", "capped-after-preemption"), _WAITS),
    **dict.fromkeys(("engine-hangs", "rank-hangs"), ("harm.no-progress", *_HELD, *_WAITS)),
    "runs-without-tokens": ("harm.no-progress", *_HELD),
}
"""What clients suffer by it, which harm.* tells as long as no cause claims it."""
METRICS_CLAIMS: Final[dict[str, tuple[str, ...]]] = {
    "lost-at-end": ("leak.finished-held",),
    "lost-at-abort": ("leak.finished-held",),
    "lost-behind-fence": ("leak.finished-held",),
    "runs-without-tokens": ("stuck.engine-stalled",),
}
"""Codes that a kind of harm also makes true where metrics are all there is: they count blocks and steps, and name
neither a block's holder nor why no step ends. Such findings name the code that only the stream distinguishes.
"""


def harms_told_first(code: str) -> set[str]:
    """Return the harm.* codes that may rightly be found before this code names the cause."""
    return {harm for kind, harms in HARM_CLAIMS.items() if CLAIMS[kind].named_by == code for harm in harms}


def codes_named(harms: Iterable[Harm]) -> dict[str, Harm]:
    """Return the codes that name these harms, each with the first that it names."""
    found: dict[str, Harm] = {}
    for harm in harms:
        code = CLAIMS[harm.kind].named_by
        if code:
            found.setdefault(code, harm)
    return found


def harms_behind(code: str, harms: Iterable[Harm], source: str = "stream") -> list[Harm]:
    """Return the harms that make a finding of this code from this source of evidence true."""
    return [harm for harm in harms if code in _codes_made_true(harm.kind, source)]


def _codes_made_true(kind: str, source: str) -> tuple[str, ...]:
    more = METRICS_CLAIMS.get(kind, ()) if source == "metrics" else HARM_CLAIMS.get(kind, ())
    return (CLAIMS[kind].named_by, *CLAIMS[kind].also, *more)
