"""`make demo`: an engine, the monitor, and a load that is healthy first, then leaks, then asks for what can never fit.

DEMO_SECONDS=N ends it after N seconds of load: exit code 0 if both incidents were found and nothing else was, 1 if not.
Without it, it goes on until Ctrl-C. Either way nothing is left running.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import httpx2
from rich.console import Console
from rich.text import Text

from kvscope.monitor.base.errors import Unreachable
from kvscope.monitor.detectors.findings import severity_at_least
from kvscope.monitor.detectors.judgement import SEVERITIES
from kvscope.monitor.questions.client import ServiceClient

console = Console(highlight=False)

EXPECTED = {"leak.finished-held", "stuck.never-fits"}
BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 161, 4096
CLIENTS = 3
HEALTHY_REQUESTS = 40
"""So many completions are delivered before the fault begins: about a third of a minute's load."""
LEAKS = 6
NEVER_FITS = "demo-never-fits"
NEVER_FITS_TOKENS = BLOCK_SIZE * NUM_BLOCKS + 800
TOO_MUCH_AT_S = 42.0
SHARED = "You are asked by a demo, and what you say is random. This prefix is the same in every prompt. "
PATIENCE_S = 60.0
"""How long the client of the request that never fits waits for it. Then the load goes on."""


class Failed(Exception):
    """The demo cannot go on. The message gives the reason."""


def free_port(preferred: int) -> int:
    """Return that port if it is free, or else any."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found: int = probe.getsockname()[1]
                return found
    raise Failed("no free port on 127.0.0.1")


@contextlib.contextmanager
def running(name: str, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in a session of its own, so that Ctrl-C reaches only the demo, which then ends it."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            console.print(f"  {name} did not end when asked to, and is killed")
            process.kill()
            process.wait()


def wait_for(name: str, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the program answers. Print its output if it ends instead."""
    started = time.monotonic()
    while time.monotonic() - started < 120:
        if process.poll() is not None:
            raise Failed(f"{name} ended with exit code {process.returncode}:\n{log.read_text(errors='replace')}")
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(url, timeout=1, trust_env=False).status_code == httpx2.codes.OK:
                console.print(f"  {name} is up after {time.monotonic() - started:.1f} s")
                return
        time.sleep(0.1)
    raise Failed(f"{name} did not answer at {url} within 120 s; its output is:\n{log.read_text(errors='replace')}")


class Load:
    """Clients that ask the engine for completions until stopped."""

    def __init__(self, engine_url: str) -> None:
        self.client = httpx2.Client(base_url=engine_url, timeout=None, trust_env=False)
        self.sent = self.done = 0
        self._stopping = threading.Event()
        self._numbers = itertools.count(1)
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(CLIENTS)]

    def start(self) -> None:
        """Begin the ordinary load."""
        for thread in self._threads:
            thread.start()

    def ask_for_too_much(self) -> None:
        """One request that needs more blocks than the pool has, from a client that waits for it."""
        arguments = (NEVER_FITS, NEVER_FITS_TOKENS, 16, PATIENCE_S)
        threading.Thread(target=self._ask, args=arguments, daemon=True).start()

    def stop(self) -> None:
        """Close every connection: the engine then frees what they had."""
        self._stopping.set()
        self.client.close()

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stopping.is_set():
            self._ask(f"demo-{next(self._numbers)}", rng.randint(20, 200), rng.randint(16, 64))
            self._stopping.wait(rng.uniform(0.8, 1.6))

    def _ask(self, name: str, prompt_tokens: int, max_tokens: int, timeout_s: float | None = None) -> None:
        own = random.Random(name).choices("abcdefghijklmnopqrstuvwxyz ", k=prompt_tokens)
        prompt = "".join(own) if name == NEVER_FITS else SHARED + "".join(own)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        self.sent += 1
        with contextlib.suppress(httpx2.HTTPError, RuntimeError):  # the demo ends while it waits
            headers = {"X-Request-Id": name}
            self.client.post("/v1/completions", json=body, headers=headers, timeout=timeout_s).raise_for_status()
            self.done += 1


class Watcher:
    """Polls the monitor's findings, and prints the first of each code once its cause is likely."""

    def __init__(self, url: str) -> None:
        self.query = ServiceClient(url)
        self.codes: set[str] = set()

    def look(self) -> str:
        """Print what is new. Return one line about the engine now."""
        with contextlib.suppress(Unreachable):
            for finding in self.query.findings("firing"):
                told = finding.code in self.codes or finding.verdict == "cannot-tell"
                if not told and severity_at_least(finding.severity, "warning"):
                    self.codes.add(finding.code)
                    self._say(finding)
            for engine in self.query.engines():
                used = f"{engine.usage:.0%} of the pool used" if engine.usage is not None else "pool not known yet"
                return f"{used}, {engine.running or 0} running, {engine.waiting or 0} waiting"
            return "the monitor has heard no engine yet"
        return "the monitor does not answer"

    def _say(self, finding: Any) -> None:
        style = "red" if SEVERITIES.index(finding.severity) >= SEVERITIES.index("error") else "yellow"
        console.print()
        console.print(Text(f"  FOUND  {finding.code}  {finding.severity}, {finding.verdict}", style=f"bold {style}"))
        console.print(Text(f"  {finding.explanation}"), width=100)
        if finding.culprits.requests:
            names = finding.culprits.requests
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            console.print(Text(f"  Culprits: {', '.join(names[:6])}{more}"), width=100)
        console.print(Text(f"  Do now: {finding.do_now[0]}"), width=100)
        console.print()


def play(seconds: float | None, load: Load, watcher: Watcher) -> None:
    """Run the load until the time is over or Ctrl-C: healthy, then with a leak, then with a request that never fits."""
    started = time.monotonic()
    too_much_at = TOO_MUCH_AT_S if seconds is None else 0.7 * seconds
    leaks = too_much = False
    last_said = -5.0
    load.start()
    _say(0, "Healthy load")
    with console.status("") as status:
        while seconds is None or time.monotonic() - started < seconds:
            now = time.monotonic() - started
            if not leaks and load.done >= HEALTHY_REQUESTS:
                leaks = True
                _say(now, "Now completions of finished requests get lost: blocks leak")
            if not too_much and now >= too_much_at:
                too_much = True
                _say(now, f"A request for {NEVER_FITS_TOKENS:,} tokens: more than {NUM_BLOCKS - 1} blocks hold")
                load.ask_for_too_much()
            line = f"{now:5.0f} s  {load.done} of {load.sent} answered; {watcher.look()}"
            status.update(line)
            if not console.is_terminal and now - last_said >= 5:
                last_said = now
                console.print(line)
            time.sleep(0.5)


def _say(now: float, what: str) -> None:
    console.print(Text(f"{now:5.0f} s  {what}", style="bold"))


def verdict(watcher: Watcher) -> int:
    """0 if what was found is what there is to find."""
    watcher.look()
    missed, extra = EXPECTED - watcher.codes, watcher.codes - EXPECTED
    console.print()
    for code in sorted(EXPECTED & watcher.codes):
        console.print(Text(f"  ✓ {code} was found", style="green"))
    for code in sorted(missed):
        console.print(Text(f"  × {code} was not found", style="red"))
    for code in sorted(extra):
        console.print(Text(f"  × {code} was found, and is not there", style="red"))
    return 1 if missed or extra else 0


def main() -> int:
    """Run it."""
    seconds = float(os.environ["DEMO_SECONDS"]) if os.environ.get("DEMO_SECONDS") else None
    signal.signal(signal.SIGTERM, _as_interrupt)
    engine_port, service_port = free_port(8000), free_port(8765)
    engine_url, url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{service_port}"
    with tempfile.TemporaryDirectory(prefix="kvscope-demo-") as folder, contextlib.ExitStack() as stack:
        events = f"ipc://{folder}/events"
        console.print("\n[bold]kvscope demo[/bold]")
        console.print("  Starting the engine: a small random model, paged KV cache, on CPU …")
        log = Path(folder, "engine.log")
        arguments = (
            "kvscope.engine",
            "serve",
            "--model",
            "tiny",
            "--port",
            str(engine_port),
            "--events",
            events,
            "--block-size",
            str(BLOCK_SIZE),
            "--num-gpu-blocks-override",
            str(NUM_BLOCKS),
            "--max-model-len",
            str(MAX_MODEL_LEN),
            "--kv-connector",
            "host",
            "--fault",
            f"leak.finished-held:after={HEALTHY_REQUESTS}:every=3:limit={LEAKS}",
            "--fault",
            "stuck.never-fits",
        )
        engine = stack.enter_context(running("The engine", log, *arguments))
        wait_for("The engine", f"{engine_url}/health", engine, log)
        console.print("  Starting the monitor …")
        log = Path(folder, "monitor.log")
        service = stack.enter_context(
            running("The monitor", log, "kvscope.monitor", "serve", "--events", events, "--port", str(service_port))
        )
        wait_for("The monitor", f"{url}/healthz", service, log)
        console.print(f"\n  Open [bold]{url}[/bold] in a browser.")
        console.print(f"  The engine answers at {engine_url}")
        console.print(f"  In another terminal: .venv/bin/monitor doctor{'' if service_port == 8765 else ' ' + url}")
        console.print("  Ctrl-C ends it.\n" if seconds is None else f"  It ends after {seconds:g} s of load.\n")
        load, watcher = Load(engine_url), Watcher(url)
        stack.callback(watcher.query.close)
        stack.callback(load.stop)
        try:
            play(seconds, load, watcher)
        except KeyboardInterrupt:
            console.print("\n  Stopping …")
            return 0
        return verdict(watcher)


def _as_interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as error:
        console.print(Text(f"demo: {error}", style="red"))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
