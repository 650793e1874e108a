"""SGLang's audit of its own pools when nothing runs: what is free, evictable and protected must be all there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from .pattern import LineFields, LogPattern

_TOKENS: Final = r"(-?\d{1,15})"
_POOLS: Final = ("full", "swa", "mamba")
"""Pools of one kind of layers, each with sums of its own. Later releases print them in sections: [full] total=…"""
_SECTION: Final = re.compile(r"\[(full|swa|mamba)\] ?([^\[]{1,400})", re.ASCII)
_TOTAL: Final = re.compile(rf"(?:max_total_num_tokens?|total_size|total|_allocator\.size)\W{{1,3}}{_TOKENS}", re.ASCII)
_AVAILABLE: Final = re.compile(rf"available(?:_size)?=\s?{_TOKENS}", re.ASCII)
_FREE_OF_ALLOCATOR: Final = re.compile(rf"allocator\.available_size\(\)=\s?{_TOKENS}", re.ASCII)
_EVICTABLE: Final = re.compile(rf"evictable(?:_size)?(?:\(\))?=\s?{_TOKENS}", re.ASCII)
_PROTECTED: Final = re.compile(rf"protected(?:_size)?(?:\(\))?=\s?{_TOKENS}", re.ASCII)
_SESSIONS: Final = re.compile(rf"session_held\w{{0,20}}=\s?{_TOKENS}", re.ASCII)
_WITHHELD: Final = re.compile(rf"\b(?:uncached|withheld)=\s?{_TOKENS}", re.ASCII)
_OF_A_POOL: Final = {
    pool: re.compile(rf"\b(?:self\.\w{{1,40}}\.)?{pool}_(?=\w{{1,40}}(?:\(\))?=)", re.ASCII) for pool in _POOLS
}
_MAMBA_SIZE: Final = re.compile(rf"mamba_pool\.size=\s?{_TOKENS}", re.ASCII)


def _pool_audit(match: re.Match[str]) -> LineFields:
    """Return the pool's contents and the accounted part, in tokens. `unowned` is the difference: below 0 for too many.

    For several pools, the first whose sum is not 0. Older releases print free and evictable tokens as one sum.
    """
    text = match.string[match.start() :]
    sums = [fields for name, part in _pools_of(text) if (fields := _sum_of_pool(name, part))]
    return next((fields for fields in sums if fields["unowned"]), sums[0] if sums else {})


def _pools_of(text: str) -> Iterator[tuple[str, str]]:
    """Each pool that the text names, with its part of the text as a single pool would print it."""
    named = [pool for pool in _POOLS if f"{pool}_available_size" in text]
    if sections := _SECTION.findall(text):
        yield from sections
    elif not named:
        yield "", text
    for pool in () if sections else named:
        fields = [field for field in re.split(r",\s|\s", text) if _OF_A_POOL[pool].search(field)]
        size = _MAMBA_SIZE.search(text) if pool == "mamba" else _TOTAL.search(text)
        total = f"total={size[1]} " if size else ""
        yield pool, total + " ".join(_OF_A_POOL[pool].sub("", field) for field in fields)


def _sum_of_pool(name: str, text: str) -> LineFields:
    total, available = _TOTAL.search(text), _AVAILABLE.search(text)
    if total is None or available is None:
        return {}
    free, evictable = _FREE_OF_ALLOCATOR.search(text), _EVICTABLE.search(text)
    fields: LineFields = {"total": int(total[1]), "protected": _audit_number(_PROTECTED, text)}
    if free is not None and evictable is not None:
        fields |= {"available": int(free[1]), "evictable": int(evictable[1])}
    else:
        fields |= {"available": int(available[1]), "evictable": int(evictable[1]) if evictable else 0}
    known = ("available", "evictable", "protected")
    held = _audit_number(_SESSIONS, text) + _audit_number(_WITHHELD, text)
    fields["unowned"] = int(fields["total"]) - sum(int(fields[name]) for name in known) - held
    return fields | ({"pool": name} if name else {})


def _audit_number(expression: re.Pattern[str], text: str) -> int:
    found = expression.search(text)
    return int(found[1]) if found else 0


AUDIT_PATTERNS: Final = (
    LogPattern(
        "pool_audit_failed",
        "sglang",
        "0.4 to 0.5",
        "memory leak detected",
        r"(?:\btoken_to_kv_pool(?:_allocator)?|\b(?:(?:full|swa|mamba|KV cache) )?pool) memory leak detected",
        "ValueError: token_to_kv_pool_allocator memory leak detected! self.max_total_num_tokens=270331,"
        " available_size=644, evictable_size=269628, protected_size=0",
        _pool_audit,
    ),
    LogPattern(
        "pool_audit_failed",
        "sglang",
        "0.1 to 0.3",
        "max_total_num_token",
        r"Warning: available_size=\d{1,15}, max_total_num_token",
        "UserWarning: Warning: available_size=35244, max_total_num_token=42308",
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
