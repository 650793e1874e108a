"""Whose blocks the pool is handing out or taking back.

The pool does not receive the request. Its callers, the cache managers, know, and have called their argument
`request_id` or `request` in every release. They are looked for on the stack, which costs a few microseconds for each
call that moves blocks, and nothing for the many that move none: most requests need no block in most steps.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any, TypeAlias

FRAMES = range(16)
"""How far up the stack to look."""


Caller: TypeAlias = tuple[str, int, str]
"""For which request, in which KV cache group, and by which function. A plain tuple: a named one takes too long."""


def caller(scheduler: object) -> Caller | None:
    """Return the caller of the hooked method: None if the scheduler called it itself, or a caller that manages no
    request's blocks.

    Only cache managers and their coordinator own blocks for a request. A connector may have a `request` too, whose
    blocks it pins for itself.
    """
    frame: FrameType | None = sys._getframe(3)  # beyond the hook and the wrapper: mostly the one that knows
    for _ in FRAMES:
        if frame is None:
            return None
        code = frame.f_code
        _, argument = _arguments.get(id(code)) or _look_at(code)
        if argument:
            found = frame.f_locals
            who = found.get("self")
            if who is scheduler:
                return None
            if argument != "self" and _manages_blocks(who):
                request_id = found[argument] if argument == "request_id" else found[argument].request_id
                return request_id, getattr(who, "kv_cache_group_id", 0), code.co_name
        frame = frame.f_back
    return None


def _manages_blocks(who: object) -> bool:
    return hasattr(who, "kv_cache_group_id") or hasattr(who, "single_type_managers") or hasattr(who, "coordinator")


def gives(frame: FrameType) -> bool:
    """Whether this is a cache manager's method that has the request's id: it is all that need be asked."""
    return _look_at(frame.f_code)[1] == "request_id" and hasattr(frame.f_locals.get("self"), "kv_cache_group_id")


_arguments: dict[int, tuple[CodeType, str]] = {}
"""By a function's code, kept so that its id stays its own: the argument that names the request. The search is slow.
Looking is slow.
"""


def _look_at(code: CodeType) -> tuple[CodeType, str]:
    names = code.co_varnames[: code.co_argcount]
    pair = code, next((name for name in ("request_id", "request", "self") if name in names), "")
    _arguments[id(code)] = pair
    return pair


def beneficiary() -> tuple[Any, int] | None:
    """Return the request for which the scheduler is making room, and how many tokens it needs slots for, or None."""
    frame = sys._getframe(2)
    for _ in FRAMES:
        if frame.f_code.co_name == "schedule" and "request" in frame.f_locals:
            return frame.f_locals["request"], frame.f_locals.get("num_new_tokens", 1)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
