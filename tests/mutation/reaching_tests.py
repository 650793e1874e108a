"""Which tests reach which functions of a room, and how long each takes: recorded by a pytest plugin."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
import pytest


class ReachedFunctions(msgspec.Struct):
    """By function, as `module file:first line`, the tests that call it; and by test, its seconds."""

    tests: dict[str, list[str]] = {}
    seconds: dict[str, float] = {}


class ReachRecorder:
    """The plugin: notes the functions of `folders` that each test calls."""

    def __init__(self, folders: tuple[str, ...]) -> None:
        self.folders = folders
        self.tests: dict[str, list[str]] = defaultdict(list)
        self.seconds: dict[str, float] = {}
        self._called: set[CodeType] = set()

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            self._called.add(frame.f_code)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, None, None]:
        """Record one test with its fixtures."""
        self._called.clear()
        began = time.perf_counter()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
        self.seconds[item.nodeid] = round(time.perf_counter() - began, 4)
        for code in self._called:
            if any(folder in code.co_filename for folder in self.folders):
                self.tests[place_of(code)].append(item.nodeid)

    def recorded(self) -> ReachedFunctions:
        """Return all that was recorded."""
        return ReachedFunctions(dict(self.tests), self.seconds)


def place_of(code: CodeType) -> str:
    """Name a function by its file's real path and first line."""
    return f"{Path(code.co_filename).resolve()}:{code.co_firstlineno}"


def record_reach(arguments: list[str], folders: tuple[str, ...]) -> ReachedFunctions:
    """Run tests in this process, and return what they reach."""
    recorder = ReachRecorder(folders)
    pytest.main([*arguments, "-q", "-p", "no:cacheprovider", "-p", "no:randomly"], plugins=[recorder])
    return recorder.recorded()
