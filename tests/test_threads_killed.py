"""Whatever ends a thread of `monitor serve`, `agent` or `hub` is reported, and the thread runs again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvscope.monitor.base.supervision import SupervisedThread, Supervisor
from tests.fleet.nats_servers import bus_config_of, one_server, set_up
from tests.test_service import process, receiver
from tests.waiting import until

EXCEPTIONS = ("MemoryError", "SystemExit")
"""One that `except Exception` contains, and one that it does not."""


class Killable:
    """A command in a process of its own, whose threads can be killed."""

    def __init__(self, run: subprocess.Popen[str]) -> None:
        assert run.stderr is not None
        address = re.search(r"http://127\.0\.0\.1:\d+", run.stderr.readline())
        assert address is not None
        self.client = httpx2.Client(base_url=address[0], trust_env=False, timeout=60)
        self._run = run
        self._reported: dict[tuple[str, str], set[str]] = {}
        """Where the death of a worker by an exception was seen."""

    def workers(self) -> list[str]:
        return [name.removeprefix("kvscope ") for name in self.tell("") if name.startswith("kvscope ")]

    def kill(self, worker: str, exception: str) -> None:
        self.tell(f"{worker}\t{exception}")

    def killed(self, worker: str, exception: str, failures_before: int) -> bool:
        """Kill it, and again if nothing is reported: Python ignores what is thrown into a destructor or a callback.

        A report stands for seconds, in which busy cores answer some of the requests: `_reported` keeps those places
        that have shown it already.
        """
        self.kill(worker, exception)
        patience = time.monotonic() + 20
        while time.monotonic() < patience:
            if self.reports(worker, exception, failures_before):
                return True
        return False

    def tell(self, line: str) -> list[str]:
        assert self._run.stdin is not None
        assert self._run.stdout is not None
        self._run.stdin.write(f"{line}\n")
        self._run.stdin.flush()
        return list(json.loads(self._run.stdout.readline()))

    def health(self) -> dict[str, Any]:
        return dict(self.client.get("/healthz").json())

    def is_reported(self, worker: str, exception: str) -> bool:
        """On /healthz, on /metrics, and where the page has it from: a finding, or a note of a hub."""
        places = self._reported.setdefault((worker, exception), set())
        if worker in self.health().get("failing", ()):
            places.add("health")
        if re.search(
            rf'kvscope_worker_failing\{{kind="\w+",worker="the thread of {re.escape(worker)}"\}}', self.metrics()
        ):
            places.add("metrics")
        shown = [each["explanation"] for each in self.client.get("/api/findings").json()]
        shown += [each["text"] for each in self.client.get("/api/fleet_overview").json()["notes"]]
        if any(f"the thread of {worker}" in text and exception in text for text in shown):
            places.add("findings")
        return len(places) == 3

    def reports(self, worker: str, exception: str, failures_before: int) -> bool:
        """A reader contains what it calls: an exception there costs no turn, and is counted."""
        is_contained = worker.startswith("reader") and exception != "SystemExit"
        return self.is_reported(worker, exception) or (is_contained and self.failures() > failures_before)

    def failures(self) -> int:
        return sum(
            int(float(count)) for count in re.findall(r"kvscope_worker_failures_total\{.* (\S+)", self.metrics())
        )

    def metrics(self) -> str:
        return self.client.get("/metrics").text


@contextmanager
def killable(*arguments: str) -> Iterator[Killable]:
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.threads_process", *arguments, "--port", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        killed = Killable(started)
        with killed.client:
            yield killed
    finally:
        started.kill()
        started.communicate()


def kill_each(service: Killable, workers: set[str]) -> None:
    """Kill each thread by each exception, and see it reported and at work again."""
    until(lambda: service.client.get("/api/fleet_overview").json()["engines"], "an engine is seen")
    until(lambda: service.health()["threads"] == {"expected": len(workers), "running": len(workers)}, "all run")
    assert set(service.workers()) == workers
    for exception in EXCEPTIONS:
        for worker in sorted(workers):
            what = f"{worker} was killed by {exception}"
            until(partial(service.killed, worker, exception, service.failures()), what)
            until(lambda: service.health()["threads"]["running"] == len(workers), f"{what} and runs")
        until(lambda: service.health()["status"] == "ok", "all is well again")
    assert set(service.workers()) == workers


@contextmanager
def an_engine(folder: Path) -> Iterator[str]:
    events = f"ipc://{folder}/events"
    with process("kvscope.lab.stepped_process", events, f"{events}-replay", "", "4"):
        yield events


@pytest.mark.slow
def test_every_thread_of_serve(tmp_path: Path) -> None:
    (tmp_path / "targets.json").write_text("[]")
    (tmp_path / "kvscope.toml").write_text(f'[[file_sd]]\nfiles = ["{tmp_path}/targets.json"]\n')
    with ExitStack() as stack:
        engine = stack.enter_context(an_engine(tmp_path))
        url, _ = stack.enter_context(receiver())
        flags = ["--events", engine, "--config", str(tmp_path / "kvscope.toml"), "--data", str(tmp_path / "data")]
        flags += ["--archive", str(tmp_path / "archive"), "--alert", url, "--alert-private"]
        service = stack.enter_context(killable("serve", *flags, "--otlp", url, "--otlp-sample", "0"))
        alerts = next(name for name in service.workers() if name.startswith("alerts to"))
        discovery = next(name for name in service.workers() if name.startswith("the discovery"))
        otlp = {f"OTLP {signal}" for signal in ("metrics", "traces queue", "logs queue", "metrics queue")}
        own = {"the watchdog", "the keeper of history", "the archive", "configuration reload", discovery}
        kill_each(service, {f"reader {engine}", alerts} | otlp | own)


@pytest.mark.slow
def test_every_thread_of_an_agent_and_a_hub(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(one_server(tmp_path / "nats"))
        set_up(bus_config_of([server]))
        engine = stack.enter_context(an_engine(tmp_path))
        url, _ = stack.enter_context(receiver())
        agent = stack.enter_context(killable("agent", "--events", engine, "--nats", server.url, "--nats-share"))
        hub = stack.enter_context(killable("hub", "--nats", server.url, "--alert", url, "--alert-private"))
        until(lambda: any(name.startswith("alerts to") for name in hub.workers()), "the hub holds the lease of alerts")
        alerts = next(name for name in hub.workers() if name.startswith("alerts to"))
        kill_each(agent, {f"reader {engine}", "the watchdog", "the link to NATS"})
        until(lambda: hub.health()["connected"] and hub.health()["complete"], "the hub reads on")
        kill_each(hub, {"the reader of the fleet", alerts})
        assert agent.health()["bus"]["connected"]


def test_a_thread_that_fails_for_days_is_tried_again() -> None:
    """The pause doubles up to a bound, and its exponent is bounded too."""
    supervisor, turns = Supervisor(), []

    def turn() -> float:
        turns.append(1)
        raise OSError("the disk is full")

    thread = SupervisedThread("a test", "delivery", turn, supervisor, within_s=60)
    thread._failures = 5_000
    thread.start()
    try:
        until(lambda: turns, "a turn")
        until(lambda: supervisor.failures(), "a failure")
        assert thread.is_running
        assert 1.0 <= thread._pause_s <= 8.0
    finally:
        assert thread.stop()
    assert supervisor.threads() == []
    assert supervisor.late(0) == {}
