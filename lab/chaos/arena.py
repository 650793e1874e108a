"""The processes of a chaos run: engines, one monitor and one receiver, and what lies between them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx2

from ..faked_clock import LIBRARY, FakedClock
from ..recorded_pages import page, rows
from .engines_process import chaos_engine_name, events_port
from .link import CutLink, SmallDisk

PROCESSES: Final = 3
ENGINES_EACH: Final = 4
ENGINES: Final = PROCESSES * ENGINES_EACH
AT_WORK: Final = ("serving", "degraded", "slow", "idle")
"""Statuses of an engine that is received and goes on."""
FIRST_PORT: Final = 26_000
MONITOR_PORT: Final = 28_765
RECEIVER_PORT: Final = 28_766
CHAOS_TOKEN: Final = "chaos-token-of-one-run"
WITHOUT_OVERRIDE: Final = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
"""Root may write everywhere. Without these capabilities a directory can be read-only for it."""
PROBE_TIMEOUT_S: Final = 1.0


class Delivered(NamedTuple):
    """One message that the receiver accepted."""

    at_s: float
    message: str
    alert: str
    state: str
    engine: str
    code: str


class PageServer(ThreadingHTTPServer):
    """The metrics page of an engine without a probe. `hostile`: how it answers instead, empty for the page itself."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: str) -> None:
        super().__init__((address, 0), PageHandler)
        self.body = page(rows("never-freed")[0]).encode()
        self.hostile = ""
        self.met_s = 0.0
        """When a scrape first met the hostile page."""
        self.url = f"http://{address}:{self.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no error."""

    def close(self) -> None:
        """Stop."""
        self.hostile = ""
        self.shutdown()
        self._thread.join()
        self.server_close()


class PageHandler(BaseHTTPRequestHandler):
    """Answers as `server.hostile` says."""

    server: PageServer

    def do_GET(self) -> None:
        """Answer one scrape."""
        hostile = self.server.hostile
        if hostile:
            self.server.met_s = self.server.met_s or time.monotonic()
        if hostile == "trickles":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while self.server.hostile:
                self.wfile.write(b"x")
                time.sleep(0.2)
        elif hostile == "errors":
            self.send_error(500)
        else:
            body = {"garbage": b"\xff\x00{" * 40_000, "huge": b"a_metric 1\n" * (7 << 20)}.get(
                hostile, self.server.body
            )
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


class Arena:
    """All of it, started. Use it in a `with` statement."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self.engines: list[subprocess.Popen[str]] = []
        self._started: list[subprocess.Popen[str]] = []
        try:
            self._set_up(folder)
        except BaseException:
            self.__exit__()
            raise

    def _set_up(self, folder: Path) -> None:
        self.link = CutLink()
        self._stack.callback(self.link.close)
        self.data = folder / "data"
        self.disk = SmallDisk(self.data)
        self._stack.callback(self.disk.close)
        self.outside = "127.0.0.1" if self.link.reason else self.link.outside
        self.inside = "127.0.0.1" if self.link.reason else self.link.inside
        self.page = PageServer(self.outside)
        self._stack.callback(self.page.close)
        self.engine_clock = FakedClock(folder / "engine-clock") if LIBRARY else None
        self.monitor_clock = FakedClock(folder / "monitor-clock") if LIBRARY else None
        self.log = folder / "received.jsonl"
        self.client = httpx2.Client(
            base_url=f"http://{self.inside}:{MONITOR_PORT}",
            headers={"authorization": f"Bearer {CHAOS_TOKEN}"},
            timeout=10,
            trust_env=False,
        )
        self._stack.callback(self.client.close)
        self.receiver = self._start_receiver()
        for number in range(PROCESSES):
            self.engines.append(self._start_engines(number))
        self.monitor = self.start_monitor()
        self.restarted_s = time.monotonic()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._started:
            end_process(process)
        self._stack.close()

    # ---------------------------------------------------------------- processes

    def _start(self, *arguments: str, inside: bool, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        prefix = self.link.prefix if inside and not self.link.reason else ()
        if inside and os.geteuid() == 0 and shutil.which("setpriv") is not None:
            prefix = (*prefix, *WITHOUT_OVERRIDE)
        variables = [f"{name}={value}" for name, value in (environment or {}).items()]
        with (self.folder / "stderr.txt").open("a") as errors:
            process = subprocess.Popen(
                [*prefix, "env", *variables, sys.executable, "-m", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._started.append(process)
        return process

    def _start_engines(self, number: int) -> subprocess.Popen[str]:
        first = number * ENGINES_EACH
        own = self.folder / "engines"
        own.mkdir(exist_ok=True)
        environment = clock_environment(self.engine_clock)
        process = self._start(
            "kvscope.lab.chaos.engines_process",
            str(own),
            str(first),
            str(ENGINES_EACH),
            str(FIRST_PORT),
            inside=True,
            environment=environment,
        )
        wait_until_ready(process)
        return process

    def restart_engines(self, number: int) -> None:
        """Start one process of engines again, after it was killed."""
        end_process(self.engines[number])
        self.engines[number] = self._start_engines(number)

    def start_monitor(self) -> subprocess.Popen[str]:
        """Start the monitor, and return at once."""
        self.restarted_s = time.monotonic()
        environment = clock_environment(self.monitor_clock)
        return self._start(
            "kvscope.lab.chaos.monitor_process", *self._monitor_arguments(), inside=True, environment=environment
        )

    def _monitor_arguments(self) -> list[str]:
        receiver = f"http://{self.outside}:{RECEIVER_PORT}/hook"
        events = [f"tcp://127.0.0.1:{events_port(FIRST_PORT, number)}" for number in range(ENGINES)]
        return [self.inside, str(MONITOR_PORT), CHAOS_TOKEN, str(self.data), receiver, self.page.url, *events]

    def second_monitor(self) -> subprocess.Popen[str]:
        """Start another monitor with the same data directory and port."""
        return self._start("kvscope.lab.chaos.monitor_process", *self._monitor_arguments(), inside=True)

    def restart_monitor(self) -> None:
        """Start the monitor again, after it was killed."""
        end_process(self.monitor)
        self.monitor = self.start_monitor()

    def _start_receiver(self) -> subprocess.Popen[str]:
        process = self._start(
            "kvscope.lab.chaos.receiver_process", self.outside, str(RECEIVER_PORT), str(self.log), inside=False
        )
        wait_until_ready(process)
        return process

    def restart_receiver(self) -> None:
        """Start the receiver again, after it was killed."""
        end_process(self.receiver)
        self.receiver = self._start_receiver()

    # ---------------------------------------------------------------- questions

    def ask(self, path: str, **parameters: str) -> Any:
        """Ask the monitor. Raises httpx2.HTTPError."""
        answer = self.client.get(path, params=parameters)
        answer.raise_for_status()
        return answer.json()

    def is_up(self) -> bool:
        """Whether /healthz answers an outside probe in time."""
        try:
            return self.client.get("/healthz", timeout=PROBE_TIMEOUT_S).status_code == 200
        except httpx2.HTTPError:
            return False

    def does_not_see(self, engines: tuple[str, ...]) -> bool:
        """Whether the monitor reports each of these engines as silent, stopped or unknown, or as one that hangs."""
        try:
            views = {view["engine"]: view["status"] for view in self.ask("/api/engines")}
            findings = self.ask("/api/findings", state="firing")
        except httpx2.HTTPError:
            return False
        hanging = {each["engine"] for each in findings if each["code"].startswith("stuck.engine")}
        return all(views.get(name) in ("silent", "stopped", "unknown") or name in hanging for name in engines)

    def reports_blindness(self, text: str) -> bool:
        """Whether a blind.* finding fires whose explanation has a text that matches."""
        try:
            findings = self.ask("/api/findings", state="firing")
        except httpx2.HTTPError:
            return False
        blind = [each for each in findings if each["code"].startswith("blind.")]
        return any(re.search(text, each["explanation"]) for each in blind)

    def is_settled(self) -> bool:
        """Whether the monitor is up, has all engines, and reports no part of it that does not work."""
        try:
            views = [view for view in self.ask("/api/engines") if view["signal"] == "stream"]
            sources = self.ask("/api/sources")
        except httpx2.HTTPError:
            return False
        seen = [view for view in views if view["status"] in AT_WORK]
        return len(seen) == ENGINES and all(source["in_step"] and not source["error"] for source in sources)

    def received(self) -> list[Delivered]:
        """Return what the receiver accepted, in order."""
        found = []
        for line in self.log.read_text().splitlines() if self.log.exists() else ():
            entry = json.loads(line)
            data = entry["data"]
            if data["changes"]:
                continue  # it neither begins nor ends
            found.append(Delivered(entry["at_s"], entry["id"], data["id"], data["state"], data["engine"], data["code"]))
        return found

    def set_leak(self, number: int, is_on: bool) -> None:
        """Begin or end the leak of an engine."""
        marker = self.folder / "engines" / f"leak-{number}"
        if is_on:
            marker.touch()
        else:
            marker.unlink(missing_ok=True)


def open_alerts(received: list[Delivered], engine: str = "", code: str = "") -> set[str]:
    """Return the alerts that the receiver takes to be firing."""
    states: dict[str, str] = {}
    for each in received:
        if engine in ("", each.engine) and code in ("", each.code):
            states[each.alert] = each.state
    return {alert for alert, state in states.items() if state == "firing"}


def repeats(received: list[Delivered]) -> Counter[str]:
    """Return how often each message came beyond the first time, by its id."""
    return Counter({message: count - 1 for message, count in Counter(r.message for r in received).items() if count > 1})


def under_two_ids(received: list[Delivered]) -> list[tuple[str, str]]:
    """Return the transitions that came under more than one id."""
    ids: dict[tuple[str, str], set[str]] = {}
    for each in received:
        ids.setdefault((each.alert, each.state), set()).add(each.message)
    return [transition for transition, messages in ids.items() if len(messages) > 1]


def clock_environment(clock: FakedClock | None) -> dict[str, str]:
    """Return what moves the clock of a process.

    The offset is read once a second: at every call takes too long. Waits on the monotonic clock are left alone:
    otherwise threads that wait for the interpreter's lock wake up late.
    """
    if clock is None:
        return {}
    return {name: value for name, value in clock.environment.items() if name != "FAKETIME_NO_CACHE"} | {
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
    }


def end_process(process: subprocess.Popen[str]) -> None:
    """Kill a process and wait for its end."""
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    """Wait for the line `ready`. Raises RuntimeError if it does not come."""
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise RuntimeError(f"{process.args!r} did not start: see stderr.txt")


def wait_for(done: Callable[[], object], seconds: float, every_s: float = 0.1) -> float:
    """Return after how many seconds `done` was true; -1 if it was not within the time."""
    began_s = time.monotonic()
    while not done():
        if time.monotonic() - began_s > seconds:
            return -1.0
        time.sleep(every_s)
    return time.monotonic() - began_s


def engine_names(process: int) -> tuple[str, ...]:
    """Return the names of the engines of a process."""
    return tuple(chaos_engine_name(process * ENGINES_EACH + each) for each in range(ENGINES_EACH))
