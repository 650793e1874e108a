"""Which mutants to run: a seeded draw, a third each from the detectors, the findings and the probe.

The draw of the first seed is kept in drawn_sample.jsonl, so that a change of the code leaves it as it is but for the
mutants of that code: others are drawn in their place.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

from .mutant_sites import Mutant, mutants_of
from .review_mutants import review_mutants

ROOT: Final = Path(__file__).resolve().parents[2]
AREAS: Final = {
    "detectors": ("monitor/detectors",),
    "findings": ("monitor/detectors/findings.py", "monitor/ledger", "monitor/ledger"),
    "probe": ("monitor/probes",),
}
"""Places of each area, which are drawn from equally: the findings, and the account that they are judged from."""
KEPT_SEED: Final = 1
KEPT_DRAW: Final = Path(__file__).with_name("drawn_sample.jsonl")
"""A line for each mutant: the place, and what `_identities` yields."""


def sample(count: int, seed: int, only: str) -> list[tuple[str, Mutant]]:
    """Return those of the review, and as many from each area. A smaller sample is part of a larger one."""
    chosen = [(area_of(mutant.module), mutant) for mutant in review_mutants(ROOT)]
    named = {mutant for _, mutant in chosen}
    for area, places in AREAS.items():
        mine = count // len(AREAS) - sum(area == each for each, _ in chosen)
        drawn = _in_turn([_shuffled(place, seed) for place in places])
        chosen += [(area, mutant) for mutant in drawn if mutant not in named][: max(mine, 0)]
    return [(area, one) for area, one in chosen if only in f"{one.module} {one.function} {one.text}"]


def _shuffled(place: str, seed: int) -> list[Mutant]:
    every = [mutant for file in files_of(ROOT / place) for mutant in mutants_of(file, module_of(file))]
    by_identity = dict(zip(_identities(every), every, strict=True))
    kept = [by_identity[one] for one in _kept_draw(place) if one in by_identity] if seed == KEPT_SEED else []
    random.Random(f"{seed} {place}").shuffle(every)
    return list(dict.fromkeys((*kept, *every)))


@cache
def _kept_draw(place: str) -> list[tuple[str | int, ...]]:
    lines = [json.loads(line) for line in KEPT_DRAW.read_text().splitlines()]
    return [tuple(identity) for drawn_from, *identity in lines if drawn_from == place]


def _identities(mutants: Iterable[Mutant]) -> Iterator[tuple[str | int, ...]]:
    """Yield what tells each apart wherever its line moves: module, function, line of source, change, and which of
    those alike it is.
    """
    seen: Counter[tuple[str, ...]] = Counter()
    for mutant in mutants:
        alike = (mutant.module, mutant.function, mutant.source, mutant.text)
        yield *alike, seen[alike]
        seen[alike] += 1


def _in_turn(draws: list[list[Mutant]]) -> list[Mutant]:
    """Take one of each draw at a time, and of the longer ones what is left."""
    longest = max(len(draw) for draw in draws)
    return [draw[index] for index in range(longest) for draw in draws if index < len(draw)]


def area_of(module: str) -> str:
    """Return the area of a module."""
    path = path_of(module).relative_to(ROOT).as_posix()
    # The state that findings are judged from is not drawn from. The review's mutants of it count with the findings.
    return next((area for area, places in AREAS.items() if path.startswith(places)), "findings")


def files_of(place: Path) -> list[Path]:
    """Return the modules of a place."""
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def module_of(file: Path) -> str:
    """Return the name that a file is imported by."""
    return "kvscope." + ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def path_of(module: str) -> Path:
    """Return the file of a module that is no package."""
    return ROOT / f"{module.removeprefix('kvscope.').replace('.', '/')}.py"
