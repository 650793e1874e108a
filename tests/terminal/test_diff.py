"""`monitor diff`: two recordings, or two windows of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvscope.engine.bench.load_bench import BenchLoad
from kvscope.engine.bench.simulated_bench import bench_simulated
from kvscope.engine.config import EngineConfig
from kvscope.monitor.terminal.cli import main

LOAD = BenchLoad(num_prompts=30, request_rate=3, input_len=200, output_len=100, prefix_len=64)
SECONDS = 30.0
MIRRORED = {"better": "worse", "worse": "better", "added": "removed", "removed": "added"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same load on a sound engine, on one whose connector keeps blocks, and on one with too small a pool."""
    made = {}
    for name, blocks, faults in (
        ("sound", 513, ()),
        ("leaking", 513, ("leak.finished-held:every=2",)),
        ("tight", 40, ()),
    ):
        made[name] = tmp_path_factory.mktemp(name)
        config = EngineConfig(num_gpu_blocks_override=blocks, kv_connector="host", faults=faults, max_model_len=512)
        bench_simulated(LOAD, config, SECONDS, made[name])
    return made


def diff(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Exit code, the findings' changes by code, the figures by name."""
    code = main(["diff", "--format", "json", *map(str, arguments)])
    printed = json.loads(capsys.readouterr().out)
    return code, {row["code"]: row for row in printed["findings"]}, {row["name"]: row for row in printed["metrics"]}


def test_a_leak_that_came(capsys: pytest.CaptureFixture[str], runs: dict[str, Path]) -> None:
    code, findings, figures = diff(capsys, runs["sound"], runs["leaking"])
    assert code == 1
    leak = findings["leak.finished-held"]
    assert (leak["status"], leak["before"], leak["after"]) == ("added", 0, 1)
    assert len(leak["requests"]) == LOAD.num_prompts // 2
    assert figures["held by finished at peak"]["change"] == "worse"
    assert figures["tokens generated"]["change"] == "same"
    code, again, mirrored = diff(capsys, runs["leaking"], runs["sound"])
    assert code == 0
    assert again["leak.finished-held"]["status"] == "removed"
    for name, row in figures.items():
        assert mirrored[name]["change"] == MIRRORED.get(row["change"], row["change"])
        assert (mirrored[name]["before"], mirrored[name]["after"]) == (row["after"], row["before"])


def test_the_same_twice(capsys: pytest.CaptureFixture[str], runs: dict[str, Path]) -> None:
    code, findings, figures = diff(capsys, runs["leaking"], runs["leaking"])
    assert code == 0
    assert {row["status"] for row in findings.values()} == {"unchanged"}
    assert {row["change"] for row in figures.values()} <= {"same", ""}


def test_the_figures_are_those_of_the_load(capsys: pytest.CaptureFixture[str], runs: dict[str, Path]) -> None:
    main(["diff", "--format", "json", str(runs["sound"]), str(runs["tight"])])
    printed = json.loads(capsys.readouterr().out)
    sound, tight = printed["before"], printed["after"]
    assert sound["counts"]["served"] == len(sound["time_to_first_token_s"]) == LOAD.num_prompts
    assert sound["counts"]["output_tokens"] == LOAD.num_prompts * LOAD.output_len
    assert sound["counts"]["preemptions"] == 0
    figures = {row["name"]: row for row in printed["metrics"]}
    for name, count, per_s in (("tokens generated", "output_tokens", 1), ("requests served", "served", 60)):
        assert figures[name]["before"] * sound["seconds"] == pytest.approx(sound["counts"][count] * per_s)
    # Where they have to wait for blocks, they wait for their first token.
    assert max(tight["waited_s"]["KV_BLOCKS"]) > 0
    assert "KV_BLOCKS" not in sound["waited_s"]
    assert figures["first token, p95"]["change"] == figures["waited, NEW, p95"]["change"] == "worse"
    assert figures["waited, KV_BLOCKS, p95"]["before"] is None
    assert figures["waited, KV_BLOCKS, p95"]["change"] == "worse"
    assert tight["peak"]["running"] <= tight["peak"]["total"]


def test_windows_of_one_recording(capsys: pytest.CaptureFixture[str], runs: dict[str, Path]) -> None:
    _, _, before_it = diff(capsys, runs["leaking"], "--window", "20s..10s")
    _, _, two = diff(capsys, runs["leaking"], "--window", "30s..20s", "--window", "20s..10s")
    assert before_it == two
    code, findings, _ = diff(capsys, runs["leaking"], "--window", "..28s", "--window", "10s..")
    assert code == 1
    assert findings["leak.finished-held"]["status"] == "added"


def test_the_table(capsys: pytest.CaptureFixture[str], runs: dict[str, Path]) -> None:
    assert main(["diff", str(runs["sound"]), str(runs["leaking"])]) == 1
    printed = capsys.readouterr().out
    lines = printed.replace(str(runs["sound"]), "run1").replace(str(runs["leaking"]), "run2").splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:3] == ["came", "error", "leak.finished-held,"] for line in lines)
    assert any(line.startswith("  held by finished at peak") and line.endswith(" worse") for line in lines)
    assert lines[-1].startswith("WORSE: a finding came.")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["RUN"], 2, "--window FROM..UNTIL"),
        (["RUN", "RUN", "--window", "10s.."], 2, "two windows"),
        (["RUN", "--window", "..10s"], 2, "a beginning"),
        (["tests/data/seed-000.log", "RUN"], 2, "monitor record"),
        (["RUN", "no-such"], 2, "no such file"),
        (["RUN", "--window", "2h..1h"], 3, "has nothing from"),
    ],
)
def test_what_cannot_be_compared(
    capsys: pytest.CaptureFixture[str], runs: dict[str, Path], arguments: list[str], code: int, says: str
) -> None:
    assert main(["diff", *(str(runs["sound"]) if word == "RUN" else word for word in arguments)]) == code
    assert says in capsys.readouterr().err
