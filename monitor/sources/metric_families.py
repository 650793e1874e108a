"""What becomes of each metric family of an engine: it is read, or ignored for a reason (metric_families.toml).

A family that is in neither is unknown, as one of a later release, and is named.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ..contract.samples import Fact
from .exposition import CONFIGURATION, DURATIONS, FIELDS

FAMILIES_FILE: Final = Path(__file__).with_name("metric_families.toml")
_ENDINGS: Final = re.compile(r"(?:_total)?(?:_(?:total|bucket|sum|count|created))?$")
_ENGINES: Final = ("vllm:", "sglang:", "kvscope_engine_")
MOST_UNKNOWN_NAMED: Final = 5


class _Ignored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    because: str
    families: list[str]


class FamilyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table: the codes by field of a sample, and groups of families that are ignored for one reason."""

    read: dict[str, list[str]]
    ignored: list[_Ignored]

    def reason(self, family: str) -> str:
        """Return why a family is ignored, or an empty text if no group has it."""
        for group in self.ignored:
            stems = tuple(name[:-1] for name in group.families if name.endswith("*"))
            if family in group.families or (stems and family.startswith(stems)):
                return group.because
        return ""


@cache
def family_table() -> FamilyTable:
    """Return the table of the package."""
    return msgspec.convert(tomllib.loads(FAMILIES_FILE.read_text(encoding="utf-8")), FamilyTable)


def metric_family(series: str) -> str:
    """Return the family of a series or its metric: the name without the endings that Prometheus adds."""
    return _ENDINGS.sub("", series, count=1)


_SERIES_READ: Final = {**FIELDS, **DURATIONS, CONFIGURATION: "configuration"}
FIELD_OF_FAMILY: Final[dict[str, str]] = {metric_family(name): field for name, field in _SERIES_READ.items()}
"""The families that are read, and the field of a sample that each becomes."""


class UnusedFamilies(NamedTuple):
    """The families of an engine's page that were not used, of so many, and those among them that no table has."""

    of: int
    unused: list[str]
    unknown: list[str]

    def facts(self, engine: str, position: str) -> Iterator[Fact]:
        """Yield how many families an engine's page has, and the names of those that were not used."""
        yield Fact(engine, position, "metric_families", self.of)
        if self.unused:
            yield Fact(engine, position, "unused_metric_families", ", ".join(self.unused))

    def note(self) -> str:
        """Return the counts for a note, empty if every family was used."""
        if not self.unused:
            return ""
        text = f"{len(self.unused)} of {self.of} metric families of this page were not used (--format json names them)"
        if not self.unknown:
            return text
        more = ", …" if len(self.unknown) > MOST_UNKNOWN_NAMED else ""
        return f"{text}, and this release does not know {', '.join(self.unknown[:MOST_UNKNOWN_NAMED])}{more}"


def unused_families(series: Iterable[str]) -> UnusedFamilies:
    """Return what was not used of a page that has these series. Those of other programs do not count."""
    families = {metric_family(name) for name in series if name.startswith(_ENGINES)}
    unused = sorted(families - FIELD_OF_FAMILY.keys())
    return UnusedFamilies(len(families), unused, [family for family in unused if not family_table().reason(family)])
