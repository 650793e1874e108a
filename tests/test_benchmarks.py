"""Each benchmark and `make fleet` in a short round. The exit status counts, not the figures of a busy machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from kvscope.lab.vllm_python import PYTHON, needs_vllm

ROOT: Final = Path(__file__).parent.parent
ROUNDS: Final = {
    "archive": "--events 20000 --blocks 500",
    "crowds": "",
    "detectors": "--minutes 0.1",
    "end_to_end": "--seconds 2 --engines 1",
    "events": "--repeats 1",
    "fleet": "--seconds 12 --engines 2 --agents 1",
    "history": "--events 20000 --blocks 500",
    "hub": "--engines 4 --blocks 500 --requests 20 --repeats 2 --others 2 --seconds 2",
    "kernels": "",
    "logs": "--mb 0.2 --repeats 1",
    "long_prompts": "--seconds 1",
    "observers": "--repeats 1 --steps 100 --pool 2000",
    "scrape": "--repeats 2",
    "web": "--blocks 2000 --requests 50 --repeats 2 --viewers 1 --turns 1",
}
ROUNDS_WITH_VLLM: Final = {"front_end": "--rounds 2", "vllm_probe": "--rounds 2"}
LONGER: Final = {"detectors", "events", "fleet", "hub", "long_prompts", "web"}
"""A short round takes 10 s of CPU time or more: `make prove` runs it."""
MINUTES_EACH: Final = {"throughput", "vllm", "vllm_probe_served"}
"""Left to mypy. transformers' generate_batch fills most of the machine's free memory; the others serve a model several
times over.
"""


def ends_well(module: str, *arguments: str, **environment: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]


def test_every_benchmark_has_a_short_round() -> None:
    parsing = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "ArgumentParser(" in path.read_text()}
    assert parsing | {"crowds", "kernels"} == ROUNDS.keys() | ROUNDS_WITH_VLLM.keys() | MINUTES_EACH


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.prove if name in LONGER else pytest.mark.slow) for name in ROUNDS]
)
def test_a_short_round_of_a_benchmark_ends_well(name: str) -> None:
    ends_well(f"benchmarks.{name}", *ROUNDS[name].split())


@pytest.mark.prove
@needs_vllm
@pytest.mark.parametrize("name", ROUNDS_WITH_VLLM)
def test_a_short_round_of_a_benchmark_of_vllm_ends_well(name: str) -> None:
    ends_well(f"benchmarks.{name}", "--vllm-python", PYTHON, *ROUNDS_WITH_VLLM[name].split())


@pytest.mark.slow
def test_a_small_fleet_shows_its_incidents_and_ends() -> None:
    ends_well("scripts.fleet", FLEET_SECONDS="0", FLEET_ENGINES="6")
