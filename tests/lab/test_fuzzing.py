"""Damaged real input: nothing escapes a reader, hangs or grows. `make slow` runs a share, `make prove` all of it."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvscope.lab.fuzzing.campaign import TargetResult, fuzz, run_target
from kvscope.lab.fuzzing.fuzz_targets import FrameTarget
from kvscope.lab.fuzzing.target_table import TARGETS

ROOT = Path(__file__).parents[2]
SEED = 1
HAS_ATHERIS = importlib.util.find_spec("atheris") is not None


def assert_clean(result: TargetResult) -> None:
    print(result.line())
    assert result.is_clean, f"seed {SEED}: {result.escapes} {result.hangs} {result.growth}"
    assert set(result.outcomes) >= TARGETS[result.target].outcomes  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_share_of_damaged_input(target: str) -> None:
    result = run_target(target, SEED, 1000, seconds=10)
    print(result.line())
    assert result.is_clean, f"seed {SEED}: {result.escapes} {result.hangs} {result.growth}"


@pytest.mark.prove
@pytest.mark.parametrize("target", TARGETS)
def test_20_000_damaged_inputs(target: str) -> None:
    assert_clean(run_target(target, SEED, 20_000, seconds=3600))


@pytest.mark.prove
@pytest.mark.skipif(not HAS_ATHERIS, reason="install it: pip install -c constraints.txt atheris")
@pytest.mark.parametrize("target", ["frame", "journal", "bundle"])
def test_coverage_guided(target: str) -> None:
    command = [
        sys.executable,
        "-m",
        "kvscope.lab.fuzzing.coverage_guided",
        target,
        "--inputs",
        "20000",
        "--seed",
        str(SEED),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


class Falls(FrameTarget):
    """A reader with defects."""

    def read(self, content: bytes) -> str:
        if len(content) % 7 == 0:
            raise ZeroDivisionError
        return "read"


def test_an_escape_is_counted_and_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "falls", Falls)
    with (tmp_path / "progress").open("wb") as progress:
        result = fuzz("falls", SEED, range(60), 60.0, progress.fileno(), None)
    (numbers,) = result.escapes.values()
    assert not result.is_clean
    assert 0 < len(numbers) < result.inputs == 60
    reader = Falls(tmp_path)
    inputs = [reader.damaged(random.Random(f"{SEED}/falls/{number}")) for number in range(60)]
    assert numbers == [number for number, content in enumerate(inputs) if len(content) % 7 == 0]
