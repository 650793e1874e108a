"""Random loads through vLLM's scheduler and kvscope's under vLLM's rules: every step is the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvscope.lab.vllm_python import needs_vllm, run

IN_CI = 6
LOADS = 60


def differences(directory: Path, first: int, count: int, *rules: str) -> dict[int, str]:
    """Run so many loads, and return the first difference of each that has one."""
    printed = run("tests.probes.differential", str(directory), str(first), str(count), *rules)
    loads = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [load["seed"] for load in loads] == list(range(first, first + count))
    if not rules:
        assert sum(load["steps"] for load in loads) > 100 * count
        assert any(load["preempted"] for load in loads)
    return {load["seed"]: load["difference"] for load in loads if load["difference"]}


@needs_vllm
@pytest.mark.slow
def test_a_share_of_the_loads_is_equal_in_every_step(tmp_path: Path) -> None:
    found = differences(tmp_path, 0, IN_CI)
    assert not found, found


@needs_vllm
@pytest.mark.prove
def test_all_loads_are_equal_in_every_step(tmp_path: Path) -> None:
    found = differences(tmp_path, IN_CI, LOADS - IN_CI)
    assert not found, found


@needs_vllm
@pytest.mark.prove
def test_the_comparison_shows_rules_that_differ(tmp_path: Path) -> None:
    assert differences(tmp_path, 0, 10, "own")
