"""A seeded sample of mutants, each in a process that forks after the imports, and what became of it.

    python -m tests.mutation                    400 mutants; a third each from detectors, judgement and probe
    python -m tests.mutation --mutants 60       fewer
    python -m tests.mutation --only TEXT        those whose module, function or change contains TEXT

A mutant runs against the tests that reach its function, the quickest first, up to a bound of their usual time. The
first that fails kills it. Tests that need a process of their own, as vLLM's, are not among them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.mutation.accepted_mutants import ACCEPTED_MUTANTS
from tests.mutation.live_mutants import NotApplied, apply, function_of
from tests.mutation.mutant_sites import Mutant, mutants_of
from tests.mutation.reaching_tests import ReachedFunctions, place_of, record_reach
from tests.mutation.review_mutants import review_mutants

ROOT: Final = Path(__file__).resolve().parents[2]
AREAS: Final = {
    "detectors": ("monitor/detectors",),
    "judgement": ("monitor/findings.py", "monitor/analysis", "monitor/ledger"),
    "probe": ("monitor/probes",),
}
TESTS: Final = (
    *("tests/detectors", "tests/analysis", "tests/ledger", "tests/state", "tests/doctor"),
    *(
        "tests/test_findings.py",
        "tests/test_effects.py",
        "tests/probes/test_hooks.py",
        "tests/probes/test_front_end.py",
    ),
)
SELECT: Final = ("-m", "not slow and not prove")
MOST_TESTS_S: Final = 20.0
"""Usual time of the tests that a mutant is given."""
LIMIT_TIMES: Final = 5.0
"""A mutant that takes so many times as long as its tests do is killed by that."""
REACH_FILE: Final = ROOT / ".mutation" / "reach.json"


class MutantResult(msgspec.Struct):
    """What became of a mutant. fate: killed, survived, unreached (no test calls it) or accepted."""

    area: str
    module: str
    function: str
    kind: str
    line: int
    text: str
    fate: str
    tests: int = 0
    seconds: float = 0.0


def sample(count: int, seed: int, only: str) -> list[tuple[str, Mutant]]:
    """Return the mutants to run: those of the review, and as many from each area."""
    rng = random.Random(seed)
    named = [(area_of(mutant.module), mutant) for mutant in review_mutants(ROOT)]
    chosen = [*named]
    for area, places in AREAS.items():
        files = [file for place in places for file in _files(ROOT / place)]
        every = [mutant for file in files for mutant in mutants_of(file, _module_of(file))]
        mine = sum(each == area for each, _ in named)
        chosen += [(area, one) for one in rng.sample(every, min(max(count // len(AREAS) - mine, 0), len(every)))]
    return [(area, one) for area, one in chosen if only in f"{one.module} {one.function} {one.text}"]


def area_of(module: str) -> str:
    """Return the area of a module."""
    path = module.removeprefix("kvscope.").replace(".", "/")
    return next(area for area, places in AREAS.items() if f"{path}.py".startswith(places))


def _files(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def _module_of(file: Path) -> str:
    return "kvscope." + ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def reach(tests: Sequence[str], *, fresh: bool) -> ReachedFunctions:
    """Return what the tests reach: as recorded before, or recorded now. Lines move with every change of a source."""
    if not fresh and REACH_FILE.exists():
        return msgspec.json.decode(REACH_FILE.read_bytes(), type=ReachedFunctions)
    folders = tuple(f"/{place}" for places in AREAS.values() for place in places)  # imported by links in kvscope/
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        found = pool.submit(record_reach, [*tests, *SELECT], folders).result()
    REACH_FILE.parent.mkdir(exist_ok=True)
    REACH_FILE.write_bytes(msgspec.json.encode(found))
    return found


def tests_of(mutant: Mutant, reached: ReachedFunctions) -> list[str]:
    """Return the tests that reach a mutant, the quickest first, within the bound."""
    if mutant.value is None:
        try:
            names = set(reached.tests.get(place_of(function_of(mutant).__code__), ()))
        except NotApplied:
            return []
    else:
        file = f"{ROOT / mutant.module.removeprefix('kvscope.').replace('.', '/')}.py:"
        names = {test for place, tests in reached.tests.items() if place.startswith(file) for test in tests}
    chosen, spent = [], 0.0
    for test in sorted(names, key=lambda one: (reached.seconds[one], one)):
        spent += reached.seconds[test]
        if spent > MOST_TESTS_S and chosen:
            break
        chosen.append(test)
    return chosen


def run_mutant(mutant: Mutant, tests: list[str], usual_s: float) -> bool:
    """Run it in a fork of this process, and return whether a test failed or the time ran out."""
    child = os.fork()
    if not child:
        status = 70
        try:
            signal.alarm(round(20 + LIMIT_TIMES * usual_s))
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            apply(mutant)
            status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *SELECT, *tests]))
        except NotApplied:
            status = 71
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    if os.WIFEXITED(ended) and os.WEXITSTATUS(ended) == 71:
        raise NotApplied(mutant.function)
    return not (os.WIFEXITED(ended) and os.WEXITSTATUS(ended) == 0)


def _fate(area: str, mutant: Mutant, reached: ReachedFunctions) -> MutantResult:
    began = time.perf_counter()
    result = MutantResult(area, *mutant[:5], "unreached")
    tests = tests_of(mutant, reached)
    result.tests = len(tests)
    if tests:
        with contextlib.suppress(NotApplied):
            killed = run_mutant(mutant, tests, sum(reached.seconds[test] for test in tests))
            accepted = (mutant.module, mutant.function, mutant.text) in ACCEPTED_MUTANTS
            result.fate = "killed" if killed else "accepted" if accepted else "survived"
    result.seconds = round(time.perf_counter() - began, 1)
    return result


def warm_up(tests: Sequence[str]) -> None:
    """Import all that the tests and the mutants are of, so that a fork begins with it."""
    with contextlib.suppress(SystemExit):
        pytest.main(["--collect-only", "-q", "-q", "--no-header", "-p", "no:cacheprovider", *tests, *SELECT])
    for places in AREAS.values():
        for place in places:
            for file in _files(ROOT / place):
                with contextlib.suppress(ImportError):  # a part of the probe that needs vLLM
                    importlib.import_module(_module_of(file))


def run_sample(
    count: int, seed: int, only: str = "", tests: Sequence[str] = TESTS, *, fresh: bool = True
) -> list[MutantResult]:
    """Run a sample, and print each as it ends."""
    reached = reach(tests, fresh=fresh)
    warm_up(tests)
    results = []
    for area, mutant in sample(count, seed, only):
        result = _fate(area, mutant, reached)
        results.append(result)
        print(f"{result.fate} {result.module}:{result.line} {result.function}: {result.text}", flush=True)
    return results


def summary(results: list[MutantResult]) -> str:
    """Return the share killed of each area, and the time."""
    lines = []
    for area in (*AREAS, "all"):
        fates = Counter(one.fate for one in results if area in (one.area, "all"))
        run = fates["killed"] + fates["survived"]
        share = f"{100 * fates['killed'] / run:.0f} %" if run else "–"
        lines.append(
            f"{area}: killed {fates['killed']} of {run} ({share}), accepted {fates['accepted']},"
            f" reached by no test here {fates['unreached']}"
        )
    total_s = sum(one.seconds for one in results)
    lines.append(f"{len(results)} mutants, {total_s:.0f} s, {total_s / max(len(results), 1):.1f} s each")
    return "\n".join(lines)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=400, metavar="N", help="how many (400)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="what the sample is drawn from (1)")
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose module, function or change has TEXT")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH", help="with these tests alone")
    parser.add_argument("--again", action="store_true", help="use what the last run recorded of the tests' reach")
    parsed = parser.parse_args()
    print(summary(run_sample(parsed.mutants, parsed.seed, parsed.only, parsed.tests, fresh=not parsed.again)))
