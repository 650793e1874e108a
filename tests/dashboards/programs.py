"""Real programs for tests of what is deployed: found or skipped, started on free ports, always ended."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
import yaml

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "dashboards" / "prometheus"
TOKEN = "a token of this test"
SCRAPE_INTERVAL = "500ms"


def program(name: str, package: str) -> str:
    """Where it is; the test is skipped where it is not."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here: apt-get install {package}")
    return found


_UNTRIED_PORTS: Final = iter(random.SystemRandom().sample(range(20_000, 32_000), 12_000))


def free_port() -> int:
    """A port that no other socket gets meanwhile: below those that the kernel gives out, and another at each call."""
    for port in _UNTRIED_PORTS:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


@contextmanager
def running(
    command: Sequence[str | Path], output: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The command, from the checkout, with what it says going to `output`; ended at the end, hard if need be."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    with output.open("wb") as out:
        process = subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=variables
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def until(ready: Callable[[], Any], what: str, needs: subprocess.Popen[bytes], seconds: float = PATIENCE_S) -> Any:
    """The first true answer of `ready`; an assertion that says `what` if none comes in time or `needs` has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and needs.poll() is None:
        try:
            answer = ready()
        except httpx2.TransportError:
            answer = None
        if answer:
            return answer
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds:g} s, or {needs.args!r} has ended: {what}")


def service_command(events: str, port: int, *more: str) -> list[str]:
    """`monitor serve` of this environment."""
    monitor = str(Path(sys.executable).parent / "monitor")
    return [monitor, "serve", "--events", events, "--port", str(port), "--token", TOKEN, *more]


def answers(url: str) -> bool:
    """Whether a page is there."""
    return httpx2.get(url, trust_env=False).is_success


def quick_prometheus(folder: Path, target: str, vllm: str = "") -> Path:
    """The shipped configuration and rules in `folder`, with a test's patience, scraping `target` and, if there is one,
    what stands for a vLLM; its path.
    """
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": SCRAPE_INTERVAL}
    del config["alerting"]
    (scrape,) = config["scrape_configs"]
    (static,) = scrape["static_configs"]
    static["targets"] = [target]
    if vllm:
        config["scrape_configs"].append({"job_name": "vllm", "static_configs": [{"targets": [vllm]}]})
    credentials = folder / "token"
    credentials.write_text(TOKEN)
    scrape["authorization"]["credentials_file"] = str(credentials)
    (folder / "rules").mkdir()
    for shipped in (PROMETHEUS / "rules").glob("*.yml"):
        rules = shipped.read_text()
        for patient, quick in (("for: 1m", "for: 0s"), ("> 15 and", "> 2 and")):
            assert patient in rules
            rules = rules.replace(patient, quick)
        (folder / "rules" / shipped.name).write_text(rules)
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


class Prometheus:
    """The API of a running one, at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.began = time.time()

    def values(self, expr: str) -> list[float]:
        """Every value that `expr` has had, of every series, since this began."""
        return [float(value) for series in self.series(expr) for _, value in series["values"]]

    def series(self, expr: str) -> list[dict[str, Any]]:
        """Every series of `expr` since this began, by the API's own words: `metric`, and `values` as (time, value)."""
        params: dict[str, str | float] = {"query": expr, "start": self.began, "end": time.time(), "step": 0.5}
        found: list[dict[str, Any]] = self._get("/api/v1/query_range", params)["result"]
        return found

    def label(self, expr: str, label: str) -> set[str]:
        """The values of a label that the series of `expr` have had since this began."""
        params: dict[str, str | float] = {"match[]": expr, "start": self.began, "end": time.time()}
        return set(self._get(f"/api/v1/label/{label}/values", params))

    def _get(self, path: str, params: Mapping[str, str | float]) -> Any:
        answer = httpx2.get(f"{self.url}{path}", params=dict(params), trust_env=False).json()
        assert answer["status"] == "success", answer
        return answer["data"]
