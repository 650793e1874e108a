"""Sources and clients within the limit of open files: real services with a limit of their own."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from kvscope.monitor.base import limits
from kvscope.monitor.base.errors import BadTarget
from kvscope.monitor.base.process_limits import files_of_service, sources_that_fit
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service.source_reader import SourceReader
from kvscope.monitor.service.source_set import NO_THREAD, SourceSet, WantedSource
from kvscope.monitor.sources.source import Source, SourceStatus
from tests.dashboards.programs import program
from tests.waiting import until

SOFT, HARD = 256, 1_024
FIT = (HARD - limits.SERVICE_FILES - limits.CONNECTIONS_LEFT) // limits.SOURCE_FILES
CLIENTS = 500


@contextlib.contextmanager
def silent_engines() -> Iterator[list[str]]:
    """512 endpoints that accept connections and never publish: addresses of the loopback network, two ports."""
    with contextlib.ExitStack() as stack:
        while True:
            events = stack.enter_context(socket.create_server(("0.0.0.0", 0), backlog=2_048))
            port = events.getsockname()[1]
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("0.0.0.0", port + 1), backlog=2_048))
                break
        yield [f"tcp://127.0.{number // 256}.{number % 256}:{port}" for number in range(1, limits.SOURCES + 1)]


class Served(NamedTuple):
    url: str
    pid: int
    first_line: str

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(self.url + path, trust_env=False, timeout=30)

    def sources(self) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = self.get("/api/sources").json()
        return made

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))


@contextlib.contextmanager
def service(*arguments: str) -> Iterator[Served]:
    """`monitor serve` with SOFT open files, which it may raise to HARD."""
    prlimit = program("prlimit", "util-linux")
    command = [prlimit, f"--nofile={SOFT}:{HARD}", sys.executable, "-m", "kvscope.monitor", "serve", "--port=0"]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    serves = None
    while serves is None and (line := process.stderr.readline()):
        lines.append(line)
        serves = re.search(r"serves (http://\S+),", line)
    drain = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
    drain.start()
    try:
        assert serves is not None, f"monitor serve ended with {process.wait()}: {''.join(lines)[-2000:]}"
        yield Served(serves[1], process.pid, lines[-1])
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait(60)
        drain.join()
        process.stderr.close()
    assert "Traceback" not in "".join(lines)


@pytest.mark.slow
@pytest.mark.usefixtures("real_parts")
def test_512_sources_at_1024_files_run_as_far_as_they_fit_beside_500_clients(tmp_path: Path) -> None:
    listed, config = tmp_path / "engines.json", tmp_path / "kvscope.toml"
    listed.write_text("[]")
    config.write_text(f'[[file_sd]]\nfiles = ["{listed}"]\nrefresh = "1s"\n')
    with silent_engines() as endpoints, contextlib.ExitStack() as clients:
        events = [f"--events={endpoint}" for endpoint in endpoints]
        with service(*events, f"--config={config}", f"--data={tmp_path / 'data'}") as served:
            why = f"the service reads {FIT} sources, as its limit of {HARD} open files allows no more"
            assert f"not {limits.SOURCES - FIT} sources more: {why}" in served.first_line
            assert "LimitNOFILE=" in served.first_line
            assert "ulimit -n" in served.first_line

            sources = served.sources()
            refused = [source for source in sources if source["error"].startswith(why)]
            assert (len(sources), len(refused)) == (limits.SOURCES, limits.SOURCES - FIT)
            metrics = served.get("/metrics").text
            assert f'kvscope_source_in_step{{source="{endpoints[-1]}"}} 0.0' in metrics
            assert "sources beyond the limit" in metrics

            listed.write_text(json.dumps([{"targets": ["127.0.3.1:9"]}]))  # one more, from a discovery
            until(lambda: len(served.sources()) == limits.SOURCES + 1, "the source of the discovery")

            port = int(served.url.rpartition(":")[2])
            for _ in range(CLIENTS):
                client = clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
                client.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0")
            assert served.get("/healthz").status_code == 200
            assert served.open_files() <= HARD


def taken(endpoints: list[str]) -> tuple[int, int]:
    """The open files and threads of a service with these sources."""
    with service(*[f"--events={endpoint}" for endpoint in endpoints]) as served:
        stated = Path(f"/proc/{served.pid}/limits").read_text()
        assert re.search(rf"Max open files +{HARD} +{HARD}", stated)
        many = len(endpoints)
        until(lambda: served.threads() > many and served.open_files() > 4 * many, "readers and connections")
        return served.open_files(), served.threads()


@pytest.mark.slow
def test_a_service_raises_its_soft_limit_and_a_source_takes_no_more_than_is_counted() -> None:
    with silent_engines() as endpoints:
        few_files, few_threads = taken(endpoints[:20])
        many_files, many_threads = taken(endpoints[:60])
    assert (many_files - few_files) / 40 <= limits.SOURCE_FILES - 1  # without a history
    assert many_files <= limits.SERVICE_FILES + 60 * limits.SOURCE_FILES
    assert round((many_threads - few_threads) / 40) == limits.SOURCE_THREADS


def test_sources_and_connections_never_exceed_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed in (64, 200, 1_024, 4_096, 1 << 20, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _what, allowed=allowed: (allowed, allowed))
        fit = sources_that_fit()
        assert 0 <= fit <= limits.SOURCES
        if fit and allowed != resource.RLIM_INFINITY:
            assert files_of_service() + limits.CONNECTIONS_LEFT <= allowed
        if fit == limits.SOURCES:
            assert allowed == resource.RLIM_INFINITY or allowed >= 3_300


class Quiet(Source):
    """Brings nothing."""

    def __init__(self, target: str) -> None:
        self._target = target

    def poll(self, timeout_s: float = 0.1) -> list[object]:  # type: ignore[override]
        threading.Event().wait(0.01)
        return []

    def status(self) -> SourceStatus:
        return SourceStatus(target=self._target, kind="test")


def test_a_refused_source_is_read_when_another_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SOURCES", 1)
    watch = Pipeline()

    def opened(wanted: WantedSource) -> Source:
        if wanted.target == "bad":
            raise BadTarget("bad: no source reads this")
        return Quiet(wanted.target)

    readers = SourceSet(watch, opened, lambda source: SourceReader(source, watch))
    first, second, bad, third = map(WantedSource, ("first", "second", "bad", "third"))
    readers.start()
    for wanted in (first, second, bad, third):
        readers.add(wanted, "a test")
    assert [reader.target for reader in readers] == ["first"]
    assert [(view.target, view.in_step) for view in readers.views()[1:]] == [
        ("second", False),
        ("bad", False),
        ("third", False),
    ]
    assert all("reads 1 sources" in view.error for view in readers.views()[1:])
    assert readers.wanted("a test") == [first, second, bad, third]
    assert watch.supervisor.failures() != ()

    readers.remove([third], "a test")
    assert readers.refused() == [second, bad]
    readers.remove([first], "a test")
    assert [reader.target for reader in readers] == ["second"]
    readers.remove([second], "a test")  # the next one cannot be read, and says why
    assert [view.error for view in readers.views()] == ["bad: no source reads this"]
    readers.remove([bad], "a test")
    assert (readers.views(), watch.supervisor.failures()) == ([], ())


def test_a_source_without_a_thread_is_refused_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Pipeline()
    threadless = {"second"}
    start = threading.Thread.start

    def start_if_there_is_one(thread: threading.Thread) -> None:
        if threadless.intersection(thread.name.split()):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_if_there_is_one)
    readers = SourceSet(watch, lambda wanted: Quiet(wanted.target), lambda source: SourceReader(source, watch))
    first, second, third = map(WantedSource, ("first", "second", "third"))
    readers.add(first, "a test")
    readers.add(second, "a test")
    readers.start()
    readers.add(third, "a test")
    assert [reader.target for reader in readers] == ["first", "third"]
    assert readers.views()[-1].error == NO_THREAD
    assert watch.supervisor.health() == (2, 2, [])
    threadless.clear()
    readers.remove([first], "a test")
    assert {reader.target for reader in readers} == {"second", "third"}
    readers.stop()
