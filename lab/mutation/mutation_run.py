"""A seeded sample of mutants, each in a process that forks after the imports, and what became of it.

    python -m kvscope.lab.mutation                    400 mutants; a third each from detectors, findings and probe
    python -m kvscope.lab.mutation --mutants 60       fewer: the first of these 400
    python -m kvscope.lab.mutation --only TEXT        those whose module, function or change contains TEXT
    python -m kvscope.lab.mutation --resume FILE      run those that FILE does not settle, and add to it

A mutant runs against the tests that reach its function, those whose file names its module first, up to a bound of
their CPU time. The first that fails kills it. A test that fails without a mutant kills none. For the probe,
KVSCOPE_TEST_VLLM names a Python that has vLLM. The exit status is 1 if less than 85 % are killed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import multiprocessing
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import pytest

from .. import vllm_python
from .called_functions import place_of
from .live_mutants import NotApplied, function_of, threshold_of
from .mutant_fork import MutantFork, next_ended
from .mutant_results import LEAST_KILLED, MutantResult, accepted_as, digest, read_results, share_killed, table
from .mutant_sample import AREAS, ROOT, area_of, files_of, module_of, path_of, sample
from .mutant_sites import Mutant
from .reaching_tests import ReachedFunctions, record_reach
from .review_mutants import REVIEW_MUTANTS
from .vllm_forks import VllmForks

TESTS: Final = (
    *("tests/detectors", "tests/ledger", "tests/ledger", "tests/ledger", "tests/terminal", "tests/questions"),
    *("tests/base/test_plugins.py", "tests/probes"),
    *(
        "tests/test_findings.py",
        "tests/test_finding_continuity.py",
        "tests/test_effects.py",
        "tests/test_python_api.py",
        "tests/probes/test_hooks.py",
        "tests/probes/test_compatibility.py",
        "tests/probes/test_stand_in.py",
        "tests/probes/test_wait_causes.py",
        "tests/probes/test_front_end.py",
        "tests/probes/test_vllm_memory.py",
    ),
)
VLLM_TESTS: Final = (
    "tests/probes/test_vllm_random.py",
    "tests/probes/test_vllm_unusual_loads.py",
    "tests/probes/test_vllm_bare_verdicts.py",
    "tests/probes/test_vllm_bare.py",
)
"""Those whose runs need vLLM's scheduler and no server."""
FOLDERS: Final = (
    *(f"/{place}" for places in AREAS.values() for place in places),  # imported by links in kvscope/
    *sorted({f"/{path_of(one.module).relative_to(ROOT)}" for one in REVIEW_MUTANTS}),
)
"""Parts of the paths of the files whose functions are noted: of the areas, and of the review's mutants elsewhere."""
UNMARKED: Final = "not slow and not prove"
MOST_TESTS_S: Final = 45.0
"""CPU time of the tests that a mutant is given. One of the probe has those with vLLM besides."""


def record(tests: Sequence[str], forks: VllmForks | None) -> ReachedFunctions:
    """Return what the tests reach. Forks of this process run them."""
    found = in_a_fork(lambda: record_reach([*tests, "-m", UNMARKED], FOLDERS))
    if forks is not None:
        more = in_a_fork(lambda: record_with_vllm(forks))
        found.seconds |= more.seconds
        for place, names in more.tests.items():
            found.tests[place] = [*found.tests.get(place, ()), *names]
    return found


def in_a_fork(call: Callable[[], ReachedFunctions]) -> ReachedFunctions:
    """Return what a fork of this process recorded."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send_bytes(msgspec.json.encode(call())))
    process.start()
    sender.close()
    found = msgspec.json.decode(receiver.recv_bytes(), type=ReachedFunctions)
    process.join()
    return found


def record_with_vllm(forks: VllmForks) -> ReachedFunctions:
    """Return what the tests with vLLM reach."""
    vllm_python.run_program = forks.run
    forks.record = list(FOLDERS)
    return record_reach([*VLLM_TESTS, "-m", "not prove"], FOLDERS, VLLM_TESTS, forks)


def tests_of(mutant: Mutant, reached: ReachedFunctions) -> list[str]:
    """Return the tests that reach a mutant, within the bound: first those whose file names its module, the quickest
    first, and of each file as many as of any other by their CPU time.
    """
    file = f"{path_of(mutant.module)}:"
    if mutant.value is None:
        with contextlib.suppress(NotApplied):
            file = place_of(function_of(mutant).__code__)
    names = {
        test
        for place, tests in reached.tests.items()
        if place == file or (file[-1] == ":" and place.startswith(file))
        for test in tests
    }
    chosen: list[str] = []
    spent = 0.0
    for test in _in_order(names.difference(VLLM_TESTS), _words_of(mutant), reached.seconds):
        spent += reached.seconds[test]
        if spent > MOST_TESTS_S and chosen:
            break
        chosen.append(test)
    with_vllm = VLLM_TESTS if area_of(mutant.module) == "probe" else ()
    return [*chosen, *(test for test in with_vllm if test in names)]


def _words_of(mutant: Mutant) -> tuple[str, ...]:
    """Return the words by one of which a test's file names the mutated place."""
    stem = mutant.module.rpartition(".")[2]
    if mutant.value is None:
        return stem, stem.replace("_", "-")
    return (threshold_of(mutant).name.rpartition(".")[0],)


def _in_order(tests: Iterable[str], words: tuple[str, ...], seconds: dict[str, float]) -> list[str]:
    of_file: dict[str, float] = defaultdict(float)
    ranks = {}
    for test in sorted(tests, key=lambda one: (seconds[one], one)):
        file = test.partition("::")[0]
        of_file[file] += seconds[test]
        ranks[test] = (not _mentions(file, words), of_file[file], test)
    return sorted(ranks, key=lambda one: ranks[one])


@functools.cache
def _mentions(file: str, words: tuple[str, ...]) -> bool:
    """Whether a file has one of the words in it."""
    text = (ROOT / file).read_text()
    return any(word in text for word in words)


def warm_up(tests: Sequence[str]) -> None:
    """Import all that the tests and the mutants are of, so that a fork begins with it."""
    with contextlib.suppress(SystemExit):
        pytest.main(["--collect-only", "-q", "-q", "--no-header", "-p", "no:cacheprovider", *tests, *VLLM_TESTS])
    for file in (file for places in AREAS.values() for place in places for file in files_of(ROOT / place)):
        with contextlib.suppress(ImportError):  # a part of the probe that needs vLLM
            importlib.import_module(module_of(file))


def run_sample(
    chosen: list[tuple[str, Mutant]], reached: ReachedFunctions, forks: VllmForks | None, workers: int
) -> Iterator[MutantResult]:
    """Run mutants, so many at a time, and yield each result as it is known."""
    running: dict[int, tuple[MutantFork, MutantResult, float]] = {}
    for area, mutant in chosen:
        tests = tests_of(mutant, reached)
        result = MutantResult(area, mutant, digest(mutant.module), "unreached", len(tests))
        if not tests:
            yield result
            continue
        while len(running) >= workers:
            yield _ended(running)
        fork = MutantFork(mutant, tests, sum(reached.seconds[test] for test in tests), forks)
        running[fork.process] = (fork, result, time.perf_counter())
    while running:
        yield _ended(running)


def _ended(running: dict[int, tuple[MutantFork, MutantResult, float]]) -> MutantResult:
    process, status = next_ended(running)
    fork, result, began = running.pop(process)
    result.fate, result.killer = fork.fate(status)
    if result.fate == "survived" and accepted_as(result.mutant):
        result.fate = "accepted"
    result.seconds = round(time.perf_counter() - began, 1)
    return result


def run_all(parsed: argparse.Namespace) -> list[MutantResult]:
    """Run what the command line asks for."""
    chosen = sample(parsed.mutants, parsed.seed, parsed.only)
    known = read_results(parsed.resume) if parsed.resume else {}
    results = [known[mutant] for _, mutant in chosen if mutant in known and known[mutant].still_holds()]
    done = {result.mutant for result in results}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        forks = VllmForks(vllm_python.PYTHON, directory) if vllm_python.PYTHON else None
        if forks is not None:
            stack.callback(forks.close)
        with contextlib.redirect_stdout(sys.stderr):
            if parsed.reach and parsed.reach.exists():
                reached = msgspec.json.decode(parsed.reach.read_bytes(), type=ReachedFunctions)
                if parsed.renew:
                    again = in_a_fork(lambda: record_reach([*parsed.renew, "-m", UNMARKED], FOLDERS))
                    reached = reached.renewed(parsed.renew, again)
            else:
                reached = record(parsed.tests, forks)
            warm_up(parsed.tests)
        if parsed.reach:
            parsed.reach.write_bytes(msgspec.json.encode(reached))
        left = [(area, mutant) for area, mutant in chosen if mutant not in done]
        for result in run_sample(left, reached, forks, parsed.workers):
            results.append(result)
            print(f"{len(results)}/{len(chosen)} {result.line()} ({result.seconds} s)", file=sys.stderr, flush=True)
            if parsed.resume:
                with parsed.resume.open("ab") as file:
                    file.write(msgspec.json.encode(result) + b"\n")
    return results


def main() -> None:
    """Run the sample, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=400, metavar="N", help="how many (400)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="what the sample is drawn from (1)")
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose module, function or change has TEXT")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH", help="with these tests and vLLM's")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="how many at once (2)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="a file of results, one JSON object a line")
    parser.add_argument("--reach", type=Path, metavar="FILE", help="what tests reach: read if there, else written")
    parser.add_argument("--renew", nargs="+", default=[], metavar="FILE", help="with --reach: record these tests again")
    parsed = parser.parse_args()
    began = time.monotonic()
    results = run_all(parsed)
    print(table(results))
    print(f"seed {parsed.seed}, {(time.monotonic() - began) / 60:.0f} minutes")
    sys.exit(share_killed(results) < LEAST_KILLED)
