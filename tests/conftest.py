"""What every test is held to: it leaves no thread, process, socket or open file behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import psutil
import pytest

from kvscope.monitor.detectors.outside_pace import UNSEEN_TIMES
from kvscope.monitor.ledger import validation

# Every ledger of every test, and of every process that a test starts, checks its invariants after every batch.
os.environ.setdefault(validation.VARIABLE, "1")

# Whoever runs tests in the background ignores it, and so would every command that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


AS_SHIPPED: Final = (
    "test_docs",
    "test_golden",
    "test_outside_pace",
    "test_step_time",
    "test_thresholds",
    "test_traced",
)
"""Modules that are about the default of leak.finished-held.unseen_times, or about what it gives."""
SHIPPED_UNSEEN_TIMES: Final = UNSEEN_TIMES.value
# Judge first transfers by their grace alone in this process, also in fixtures of the session: tests copy at once.
UNSEEN_TIMES.value = 0.0


@pytest.fixture(scope="module", autouse=True)
def as_shipped(request: pytest.FixtureRequest) -> Iterator[None]:
    """Judge by the default in the modules of AS_SHIPPED."""
    if request.module.__name__.rpartition(".")[2] in AS_SHIPPED:
        UNSEEN_TIMES.value = SHIPPED_UNSEEN_TIMES
    yield
    UNSEEN_TIMES.value = 0.0


@pytest.fixture(scope="module")
def archive_runtime(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make a first request to an archive: obstore keeps a runtime from then on, with files of its own."""
    from kvscope.monitor.history.archive_store import Archive

    Archive(str(tmp_path_factory.mktemp("archive"))).has("nothing")


KERNEL_LISTS_CHILDREN: Final = os.path.exists("/proc/thread-self/children")


def _children() -> set[int]:
    if not KERNEL_LISTS_CHILDREN:
        return {child.pid for child in psutil.Process().children()}  # reads every process: most of a short test's time
    children: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{thread}/children") as file:
            children.update(map(int, file.read().split()))
    return children


def _open_things() -> tuple[set[threading.Thread], set[int], set[str]]:
    threads = set(threading.enumerate())
    children = _children()
    files = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(("socket:", "pipe:")) or "eventpoll" in target or "eventfd" in target:
            files.add(f"{fd} {target}")
    return threads, children, files


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    threads, children, files = _open_things()
    yield
    deadline = time.monotonic() + 30  # shared cores end a process late
    while True:
        now_threads, now_children, now_files = _open_things()
        left = [*(now_threads - threads), *(now_children - children), *(now_files - files)]
        if not left:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"the test left behind: {left}")
        time.sleep(0.02)
