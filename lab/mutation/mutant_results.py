"""What became of each mutant: the file of results, and the table."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from .accepted_mutants import ACCEPTED_MUTANTS
from .mutant_sample import AREAS, path_of
from .mutant_sites import Mutant

LEAST_KILLED: Final = 0.85
ALIVE: Final = ("survived", "unreached", "error")


class MutantResult(msgspec.Struct):
    """What became of a mutant. fate: killed, survived, unreached (no test here calls its function), error (its tests
    did not run) or accepted. tests: how many it was given. killer: the test that failed; empty for a time limit.
    """

    area: str
    mutant: Mutant
    module_digest: str
    fate: str
    tests: int = 0
    killer: str = ""
    seconds: float = 0.0

    def still_holds(self) -> bool:
        """Whether it was killed or shown to change nothing, and its module has not changed since."""
        return self.fate in ("killed", "accepted") and self.module_digest == digest(self.mutant.module)

    def line(self) -> str:
        """Return it as the table shows it."""
        mutant = self.mutant
        place = f"{path_of(mutant.module).name}:{mutant.line} {mutant.function}: {mutant.text}"
        return f"{self.fate} [{self.area}] {place}"


def digest(module: str) -> str:
    """Return a digest of a module's text."""
    return hashlib.blake2b(path_of(module).read_bytes(), digest_size=8).hexdigest()


def accepted_as(mutant: Mutant) -> str:
    """Return why a mutant changes nothing that can be seen, if that was shown."""
    return ACCEPTED_MUTANTS.get((mutant.module, mutant.function, mutant.source, mutant.text), "")


def read_results(path: Path) -> dict[Mutant, MutantResult]:
    """Return the last result of each mutant in a file, or none."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    results = [msgspec.json.decode(line, type=MutantResult) for line in lines]
    return {result.mutant: result for result in results}


def share_killed(results: Iterable[MutantResult]) -> float:
    """Return the share of the mutants that tests kill, of all that change something."""
    fates = Counter(result.fate for result in results)
    alive = sum(fates[fate] for fate in ALIVE)
    return fates["killed"] / max(fates["killed"] + alive, 1)


def table(results: list[MutantResult]) -> str:
    """Return the share of each area, and every mutant that lives."""
    lines = [
        f"{'area':10} {'drawn':>6} {'killed':>7} {'equivalent':>11} {'survived':>9} {'unreached':>10} {'share':>6}"
    ]
    for area in (*AREAS, "all"):
        of_area = [result for result in results if area in (result.area, "all")]
        fates = Counter(result.fate for result in of_area)
        lived = fates["survived"] + fates["error"]
        counts = (len(of_area), fates["killed"], fates["accepted"], lived, fates["unreached"])
        shown = "".join(f"{count:{width}}" for count, width in zip(counts, (7, 8, 12, 10, 11), strict=True))
        lines.append(f"{area:10}{shown}  {share_killed(of_area):5.0%}")
    lines += ["", *sorted(result.line() for result in results if result.fate in ALIVE)]
    lines += [f"{result.line()}\n    {accepted_as(result.mutant)}" for result in results if result.fate == "accepted"]
    return "\n".join(lines)
