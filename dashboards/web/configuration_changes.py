"""Configurations of an engine, field by field, and what differs between two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

OF_THE_PROCESS: Final = frozenset(("pid",))
"""Fields that differ at each start and mean nothing."""


def value_text(value: Any) -> str:
    """Return a value as the page writes it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {value_text(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "; ".join(map(value_text, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def configuration_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return name, old and new value of each field that differs. `not set` stands for a field that is missing."""
    names = [*after, *(name for name in before if name not in after)]
    return [
        (name, _side_text(before, name), _side_text(after, name))
        for name in names
        if name not in OF_THE_PROCESS and before.get(name) != after.get(name)
    ]


def _side_text(side: Mapping[str, Any], name: str) -> str:
    return value_text(side[name]) if name in side else "not set"


def changes_text(changes: list[tuple[str, str, str]], most: int = 3) -> str:
    """Return the changes in a line, such as `num_gpu_blocks 512 → 200`."""
    shown = ", ".join(f"{name} {old} → {new}" for name, old, new in changes[:most])
    return f"{shown} and {len(changes) - most:,} more" if len(changes) > most else shown
