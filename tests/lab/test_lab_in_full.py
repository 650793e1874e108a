"""The whole lab: a hundred runs of each fault and hundreds of healthy hours.

It takes about three hours of two cores with `make prove`. KVSCOPE_TEST_VLLM_RELEASES names the other releases of vLLM.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvscope.lab.vllm_python import PYTHON, RELEASES, UNPACKED, needs_vllm
from tests.lab.test_lab import INCIDENTS_COMMAND

pytestmark = pytest.mark.prove

RUNS_OF_A_FAULT = 100
RUNS_OF_A_RELEASE = 25
"""Of each fault: a hundred over four releases."""
HANGING_RANK = {"own-ranks": "stuck.engine-stalled", "vllm-ranks": "step-hangs"}
HEALTHY_RUNS = {"own": 430, "vllm": 110}
"""About 240 hours of our engine and 60 of vLLM's scheduler."""


def accuracy_of_lab(directory: Path, *flags: str) -> dict[str, Any]:
    """Run the lab. All but one run in a hundred can be run, and no *confirmed* finding from the stream is wrong."""
    page = directory / "page.md"
    subprocess.run([*INCIDENTS_COMMAND, "--run-seconds", "300", "--write", str(page), *flags], check=True)
    accuracy: dict[str, Any] = json.loads(page.with_suffix(".json").read_bytes())
    assert accuracy["failed"] <= accuracy["trials"] / 100
    (confirmed,) = (
        each for each in accuracy["verdicts"] if (each["source"], each["verdict"]) == ("stream", "confirmed")
    )
    assert confirmed["right"] == confirmed["findings"]
    return accuracy


def on_vllm(engine: str, release: str) -> tuple[str, ...]:
    """Return the flags of an engine under test on a release of vLLM, empty for the one that is installed."""
    return ("--engine", engine, "--vllm-python", PYTHON, *(("--release", str(UNPACKED / release)) if release else ()))


def test_a_hundred_runs_of_each_fault_on_our_engine(tmp_path: Path) -> None:
    accuracy_of_lab(tmp_path, "--per-fault", str(RUNS_OF_A_FAULT))


@needs_vllm
@pytest.mark.parametrize("release", RELEASES)
def test_twenty_five_runs_of_each_fault_on_each_release(release: str, tmp_path: Path) -> None:
    accuracy_of_lab(tmp_path, *on_vllm("vllm", release), "--per-fault", str(RUNS_OF_A_RELEASE))


def test_a_hundred_servers_of_ranks_of_which_one_hangs(tmp_path: Path) -> None:
    flags = ("--per-fault", str(RUNS_OF_A_FAULT), "--fault", HANGING_RANK["own-ranks"])
    accuracy_of_lab(tmp_path, "--engine", "own-ranks", *flags)


@needs_vllm
@pytest.mark.parametrize("release", RELEASES)
def test_twenty_five_servers_of_ranks_on_each_release(release: str, tmp_path: Path) -> None:
    flags = ("--per-fault", str(RUNS_OF_A_RELEASE), "--fault", HANGING_RANK["vllm-ranks"])
    accuracy_of_lab(tmp_path, *on_vllm("vllm-ranks", release), *flags)


@pytest.mark.parametrize("engine", ["own", pytest.param("vllm", marks=needs_vllm)])
def test_no_finding_in_healthy_engines_is_false(engine: str, tmp_path: Path) -> None:
    flags = on_vllm("vllm", "") if engine == "vllm" else ()
    accuracy = accuracy_of_lab(tmp_path, *flags, "--healthy", "--runs", str(HEALTHY_RUNS[engine]))
    assert [each for each in accuracy["false_rates"] if each["source"] == "stream" and each["findings"]] == []


def test_six_hundred_mixed_runs(tmp_path: Path) -> None:
    accuracy_of_lab(tmp_path, "--runs", "600")
