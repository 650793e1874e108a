"""SGLang's audit of its own pools when nothing runs: what is free, evictable and protected must be all there is."""

from __future__ import annotations

import re
from typing import Final

from kvscope.monitor.sources.log_patterns.pattern import LineFields, LogPattern

_TOKENS: Final = r"(-?\d{1,15})"
_TOTAL: Final = re.compile(rf"(?:max_total_num_tokens|total_size|total)\W{{1,3}}{_TOKENS}", re.ASCII)
_AVAILABLE: Final = re.compile(rf"available_size=\s?{_TOKENS}", re.ASCII)
_FREE_OF_ALLOCATOR: Final = re.compile(rf"allocator\.available_size\(\)=\s?{_TOKENS}", re.ASCII)
_EVICTABLE: Final = re.compile(rf"evictable_size(?:\(\))?=\s?{_TOKENS}", re.ASCII)
_PROTECTED: Final = re.compile(rf"protected_size(?:\(\))?=\s?{_TOKENS}", re.ASCII)
_SESSIONS: Final = re.compile(rf"session_held\w{{0,20}}=\s?{_TOKENS}", re.ASCII)


def _pool_audit(match: re.Match[str]) -> LineFields:
    """What the pool holds and what is accounted for, in tokens. `unowned` is the difference: below 0 for too many.

    Older releases print free and evictable tokens as one sum.
    """
    text = match.string[match.start() :]
    total, available = _TOTAL.search(text), _AVAILABLE.search(text)
    if total is None or available is None:
        return {}
    free, evictable = _FREE_OF_ALLOCATOR.search(text), _EVICTABLE.search(text)
    protected, sessions = _PROTECTED.search(text), _SESSIONS.search(text)
    fields: LineFields = {"total": int(total[1]), "protected": int(protected[1]) if protected else 0}
    if free is not None and evictable is not None:
        fields |= {"available": int(free[1]), "evictable": int(evictable[1])}
    else:
        fields |= {"available": int(available[1]), "evictable": int(evictable[1]) if evictable else 0}
    known = ("available", "evictable", "protected")
    held = int(sessions[1]) if sessions else 0
    fields["unowned"] = int(fields["total"]) - sum(int(fields[name]) for name in known) - held
    return fields


AUDIT_PATTERNS: Final = (
    LogPattern(
        "pool_audit_failed",
        "sglang",
        "0.4 to 0.5",
        "memory leak detected",
        r"(?:\btoken_to_kv_pool(?:_allocator)?|\b(?:full|swa|KV cache) pool) memory leak detected",
        "ValueError: token_to_kv_pool_allocator memory leak detected! self.max_total_num_tokens=270331,"
        " available_size=644, evictable_size=269628, protected_size=0",
        _pool_audit,
    ),
    LogPattern(
        "slot_audit_failed",
        "sglang",
        "0.4 to 0.5",
        "req_to_token_pool memory leak",
        r"req_to_token_pool memory leak detected! ?available_size=(?P<available>\d{1,9}),"
        r" total_size=(?P<total>\d{1,9})",
        "UserWarning: req_to_token_pool memory leak detected!available_size=3756, total_size=3757",
    ),
)
