"""Which tests reach which functions of a room, and how long each takes: recorded by a pytest plugin."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Sequence

import msgspec
import pytest

from .called_functions import CalledFunctions
from .vllm_forks import VllmForks


class ReachedFunctions(msgspec.Struct):
    """By function, as `module file:first line`, the tests that call it; and by test, its seconds of CPU time.

    The tests of a file that runs vLLM share its runs: the file stands for them.
    """

    tests: dict[str, list[str]] = {}
    seconds: dict[str, float] = {}

    def renewed(self, files: Sequence[str], again: ReachedFunctions) -> ReachedFunctions:
        """Return it with what the tests of `files` reach taken from a newer record."""
        tests = {
            place: [name for name in names if name.partition("::")[0] not in files]
            for place, names in self.tests.items()
        }
        for place, names in again.tests.items():
            tests[place] = sorted([*tests.get(place, ()), *names])
        return ReachedFunctions(tests, self.seconds | again.seconds)


class ReachRecorder:
    """The plugin: notes the functions of `folders` that each test calls, here and in vLLM's forks."""

    def __init__(self, folders: tuple[str, ...], whole_files: Sequence[str], forks: VllmForks | None) -> None:
        self.whole_files = whole_files
        self.forks = forks
        self.tests: dict[str, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self._calls = CalledFunctions(folders)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, None, None]:
        """Record one test with its fixtures."""
        began = sum(os.times()[:4])
        with self._calls.noted():
            yield
        name = self._name_of(item.nodeid)
        self.seconds[name] += sum(os.times()[:4]) - began
        places = set(self._calls.places())
        if self.forks is not None:
            self.seconds[name] += self.forks.cpu_s
            places |= self.forks.called
            self.forks.cpu_s, self.forks.called = 0.0, set()
        for place in places:
            self.tests[place].add(name)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that fails without a mutant kills none."""
        if report.failed:
            self.failed.add(self._name_of(report.nodeid))

    def _name_of(self, test: str) -> str:
        file = test.partition("::")[0]
        return file if file in self.whole_files else test

    def recorded(self) -> ReachedFunctions:
        """Return all that was recorded of tests that passed."""
        tests = {place: sorted(names - self.failed) for place, names in self.tests.items()}
        return ReachedFunctions(tests, {name: round(spent, 4) for name, spent in self.seconds.items()})


def record_reach(
    arguments: list[str], folders: tuple[str, ...], whole_files: Sequence[str] = (), forks: VllmForks | None = None
) -> ReachedFunctions:
    """Run tests in this process, and return what they reach."""
    recorder = ReachRecorder(folders, whole_files, forks)
    pytest.main([*arguments, "-q", "-p", "no:cacheprovider", "-p", "no:randomly"], plugins=[recorder])
    return recorder.recorded()
