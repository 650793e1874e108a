"""What every test is held to: its tier, and to leave no thread, process, socket or open file behind.

unit    imports neither the engine nor the lab, no torch and no browser, and starts nothing: `make check`
slow    marked so, or needs NATS, Prometheus, Alertmanager or Chromium and is no smoke: `make slow`
others  the engine and the lab in virtual time, small services, one smoke of each real part: `make test`, with the units

A test that starts a process or opens a socket asks for the fixture `real_parts`. A unit that does not is refused it, so
that no tier depends on anybody's memory.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import psutil
import pytest

from kvscope.monitor.ledger import invariants

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Every ledger of every test, and of every process that a test starts, checks its invariants after every batch.
os.environ.setdefault(invariants.VARIABLE, "1")

# Whoever runs tests in the background ignores it, and so would every command that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


NO_UNIT: Final = ("kvscope.engine", "kvscope.lab", "torch", "playwright")
PURE: Final = ("kvscope.engine.bench.clock", "kvscope.engine.faults")
"""Modules of the engine that a unit may import."""
SLOW_FIXTURES: Final = frozenset(("alertmanager", "browser", "prometheus"))
NATS: Final = "tests.fleet.nats_servers"
STARTS: Final = {
    "os.fork": "forks",
    "os.posix_spawn": "starts a process",
    "socket.bind": "binds a socket",
    "socket.connect": "connects a socket",
    "subprocess.Popen": "starts a process",
}
"""Audit events of Python that no unit may raise."""
LONG: Final = (
    "tests.lab.test_chaos",
    "tests.test_tutorials",
    "tests.test_threads_killed",
    "tests.probes.test_vllm_one_process_verdicts",
    "tests.probes.test_vllm_server_verdicts",
    "tests.probes.test_vllm_incidents",
    "tests.probes.test_vllm_verdicts",
    "tests.outputs.test_alerts_killed",
    "tests.fleet.test_nothing_lost",
    "tests.test_install",
)
"""Files that take minutes run first: at the end each would leave the other workers idle."""
_confined = ""
"""The unit that runs, if one does."""


def _refuse_real_parts(event: str, _arguments: tuple[Any, ...]) -> None:
    if _confined and event in STARTS and threading.current_thread() is threading.main_thread():
        raise AssertionError(f"{_confined} {STARTS[event]}: have it ask for the fixture real_parts")


sys.addaudithook(_refuse_real_parts)


@pytest.fixture(scope="session")
def real_parts() -> None:
    """Let a test start processes and open sockets. It is then no unit."""


def _origins(module: ModuleType, seen: set[str]) -> Iterator[str]:
    """Yield the modules whose names a module of tests imports, by itself and through its helpers."""
    for value in vars(module).values():
        origin = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
        if origin not in seen:
            seen.add(origin)
            yield origin
            if origin.startswith("tests.") and origin in sys.modules:
                yield from _origins(sys.modules[origin], seen)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its tier, and put long files first."""
    items.sort(key=lambda item: item.nodeid.partition(".py")[0].replace("/", ".") not in LONG)
    imported: dict[ModuleType, set[str]] = {}
    for item in items:
        assert isinstance(item, pytest.Function)
        origins = imported.get(item.module)
        if origins is None:
            origins = imported[item.module] = set(_origins(item.module, set()))
        marks = {mark.name for mark in item.iter_markers()}
        if marks & {"slow", "prove", "smoke"}:
            continue
        fixtures = set(item.fixturenames)
        if fixtures & SLOW_FIXTURES or NATS in origins:
            item.add_marker("slow")
        elif "real_parts" not in fixtures and not any(
            origin.startswith(NO_UNIT) and not origin.startswith(PURE) for origin in origins
        ):
            item.add_marker("unit")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Refuse real parts to a unit, and to the fixtures that it asks for."""
    global _confined
    _confined = item.nodeid if item.get_closest_marker("unit") else ""
    try:
        return (yield)
    finally:
        _confined = ""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, headless."""
    from kvscope.lab.chromium import NO_CHROMIUM, chromium

    if shutil.which("chromium") is None:
        pytest.skip(NO_CHROMIUM)
    with chromium() as found:
        yield found


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
