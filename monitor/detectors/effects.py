"""Which trouble may be the effect of which: what a person must do about the one ends the other too.

A cause comes before its effects, in the same engine, and what ties them is in the figures: what a leak holds must be
enough for what the head of the queue lacks. An effect is never graver than its cause, so that no alarm is lost.

stuck.never-fits is nobody's effect: it needs more than the whole pool. leak.finished-held and leak.idle-not-polled tell
each block once between them, as do leak.unaccounted and leak.rising-floor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvscope.monitor.detectors.judgement import Judgement

Tie = Callable[[Judgement, Judgement], bool]
"""Of a cause and an effect that are both judged in one engine: whether the one may be the other's."""

MIN_SHARE: Final = 0.2
"""Of the pool. Preemptions are put down to blocks that do not come back if these are so many: with less gone, a load
that thrashes is one that hardly fitted before."""


def _holds_what_is_lacking(cause: Judgement, effect: Judgement) -> bool:
    needed, free = _value(effect, "blocks_needed"), _value(effect, "blocks_free_for_it")
    return 0 < needed - free <= len(cause.blocks)


def _holds_much(cause: Judgement, effect: Judgement) -> bool:
    return _value(cause, "share_of_pool") >= MIN_SHARE and _began_later(cause, effect)


def _began_later(cause: Judgement, effect: Judgement) -> bool:
    return effect.since_ns >= cause.since_ns > 0


def _of_its_requests(cause: Judgement, effect: Judgement) -> bool:
    return set(effect.requests) <= set(cause.requests)


def _of_mostly_its_requests(cause: Judgement, effect: Judgement) -> bool:
    return 2 * len(set(effect.requests) & set(cause.requests)) >= len(effect.requests)


def _of_its_blocks(cause: Judgement, effect: Judgement) -> bool:
    return not set(cause.blocks).isdisjoint(effect.blocks)


def _value(judged: Judgement, name: str) -> float:
    found = next((item.value for item in judged.evidence if item.name == name), 0)
    return 0 if isinstance(found, str) else found


_ROOM_IS_GONE: Final[dict[str, Tie]] = {
    "stuck.head-of-line": _holds_what_is_lacking,
    "thrash.preemption": _holds_much,
    "thrash.after-retract": _holds_much,
    "sizing.kv-too-small": _holds_much,
}
_ROOM_IS_GONE_FOR_GOOD: Final[dict[str, Tie]] = _ROOM_IS_GONE | {
    "stuck.parked-loads": _holds_what_is_lacking,
    "stuck.self-preempt": _holds_much,
    "collapse.preempt-all": _holds_much,
}
_NOTHING_MOVES: Final[dict[str, Tie]] = {
    "stuck.front-end": _began_later,
    "stuck.remote-load": _began_later,
    "stuck.lost-wakeup": _began_later,
    "stuck.grammar": _began_later,
    "stuck.promotion-starved": _began_later,
    "stuck.zero-token": _began_later,
    "leak.finished-held": _began_later,
    "leak.remote-load-lost": _began_later,
    "leak.deferred-free-stalled": _began_later,
}

EFFECTS: Final[dict[str, dict[str, Tie]]] = {
    "leak.finished-held": _ROOM_IS_GONE_FOR_GOOD,
    "leak.remote-load-lost": _ROOM_IS_GONE_FOR_GOOD,
    "leak.deferred-free-stalled": _ROOM_IS_GONE_FOR_GOOD | {"thrash.cascade": _began_later},
    "leak.unaccounted": _ROOM_IS_GONE_FOR_GOOD,
    "leak.rising-floor": _ROOM_IS_GONE,
    "leak.session-pinned": _ROOM_IS_GONE,
    "stuck.remote-load": {"stuck.head-of-line": _holds_what_is_lacking},
    "stuck.zero-token": {"stuck.head-of-line": _holds_what_is_lacking},
    "stuck.self-preempt": {"thrash.preemption": _of_its_requests, "sizing.kv-too-small": _of_its_requests},
    "stuck.engine-stalled": _NOTHING_MOVES,
    "stuck.rank-diverged": _NOTHING_MOVES,
    "thrash.preemption": {"sizing.kv-too-small": _of_mostly_its_requests},
    "thrash.cascade": {"sizing.kv-too-small": _of_mostly_its_requests},
    "collapse.preempt-all": {"sizing.kv-too-small": _of_mostly_its_requests},
    "corrupt.double-free": {
        "corrupt.use-after-free": _of_its_blocks,
        "leak.unaccounted": _of_its_blocks,
        "corrupt.counter-drift": _began_later,
    },
}
"""By the code of a cause, the codes that may be its effects, each with what ties them."""


def explains(cause: Judgement, effect: Judgement) -> bool:
    """Whether `effect` is what `cause` brings about. A cause of which one cannot tell explains nothing."""
    tie = EFFECTS.get(cause.code, {}).get(effect.code)
    if tie is None or cause.engine != effect.engine or cause.verdict == "cannot-tell":
        return False
    return tie(cause, effect)
