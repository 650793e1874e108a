"""Renamed JSON keys: every answer carries the new name and, for one release, the old one beside it.

RENAMED_KEYS is the one table of them. docs/renames.md lists it, and the JSON schemas mark the old names as deprecated.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import inspect

RENAMED_KEYS: Final[dict[str, dict[str, str]]] = {
    "BalanceReport": {"signal": "attached"},
    "BlockDetail": {"ownership_chains": "because", "event_history": "story"},
    "ConditionView": {"reason": "why"},
    "Diff": {"metrics": "figures"},
    "EngineView": {"signal": "attached", "last_seen_s_ago": "heard_s_ago"},
    "EventHistoryEntry": {"kind": "what"},
    "FindingRow": {"status": "change"},
    "FreedBlocks": {"references_released": "references_left"},
    "HistoryView": {"epochs": "lives"},
    "MemoryReport": {"breakdown": "bill", "printed_suggestions": "printed"},
    "MemoryView": {"measured": "known", "unattributed": "unnamed"},
    "PhaseView": {"phase_tokens": "computed", "recomputed_tokens": "recomputed"},
    "RequestDetail": {"event_history": "story", "event_history_complete": "story_is_whole", "phases": "life"},
    "RetainedBlocksView": {"is_complete": "is_whole", "still_cached": "warm"},
    "UsageDrop": {
        "freed_in_drop": "freed_in_fall",
        "is_complete": "is_whole",
        "allocated": "taken",
        "allocated_to": "taken_by",
        "unexplained_blocks": "off_by",
    },
    "WindowStats": {"waited_s": "waits", "time_to_first_token_s": "first_tokens"},
}
"""Keys that were renamed in this release, by struct: new name → old name. JSON carries both for one release."""

OLD_VALUES: Final[dict[str, dict[str, str]]] = {
    "attached": {"metrics": "figures"},
    "change": {"added": "came", "removed": "went", "unchanged": "stayed"},
}
"""Values that were renamed with their key, by the old key: new value → old value."""


def encode_answer(value: Any) -> bytes:
    """Encode an answer as JSON, old names included."""
    return msgspec.json.encode(with_old_names(value))


def with_old_names(value: Any) -> Any:
    """Return a value whose structs with renamed keys are dicts with both names. Nothing else is copied."""
    if isinstance(value, msgspec.Struct):
        kind = type(value)
        if not has_old_names(kind):
            return value
        fields = {name: with_old_names(getattr(value, name)) for name in kind.__struct_fields__}
        renamed = RENAMED_KEYS.get(kind.__name__, {})
        return fields | {old: _old_value(old, fields[new]) for new, old in renamed.items()}
    if isinstance(value, dict):
        return {name: with_old_names(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_old_names(each) for each in value] if value and not isinstance(value[0], (str, int)) else value
    return value


@functools.cache
def has_old_names(kind: type[msgspec.Struct]) -> bool:
    """Whether a struct, or a struct within it, has a renamed key."""
    return any(each.__name__ in RENAMED_KEYS for each in structs_in(kind))


def _old_value(old: str, value: Any) -> Any:
    """Return what a value of a renamed key was before."""
    return OLD_VALUES[old].get(value, value) if old in OLD_VALUES else value


def structs_in(kind: Any) -> set[type[msgspec.Struct]]:
    """Return the struct types that a value of this type can hold, itself included."""
    found: set[type[msgspec.Struct]] = set()
    waiting = [inspect.type_info(kind)]
    while waiting:
        info = waiting.pop()
        if isinstance(info, inspect.StructType):
            if info.cls in found:
                continue
            found.add(info.cls)
            waiting += [field.type for field in info.fields]
        elif isinstance(info, inspect.CollectionType):
            waiting.append(info.item_type)
        elif isinstance(info, inspect.DictType):
            waiting.append(info.value_type)
        elif isinstance(info, inspect.UnionType):
            waiting += info.types
    return found


def schema_with_old_names(
    kinds: Sequence[Any], ref_template: str = "#/components/schemas/{name}"
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the JSON schemas of types, and of the structs in them by name. Old names are marked as deprecated."""
    schemas, components = msgspec.json.schema_components(kinds, ref_template=ref_template)
    for struct in {each for kind in kinds for each in structs_in(kind)}:
        _add_old_names(components[struct.__name__], RENAMED_KEYS.get(struct.__name__, {}))
    return list(schemas), components


def _add_old_names(component: dict[str, Any], renamed: Mapping[str, str]) -> None:
    properties = component["properties"]
    for new, old in renamed.items():
        schema = {"type": "string"} if old in OLD_VALUES else properties[new]
        properties[old] = {**schema, "deprecated": True, "description": f"Use {new}."}
