"""`monitor explain memory`, from the command line to what is printed and returned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvscope.engine.bench.load_bench import BenchLoad
from kvscope.engine.bench.simulated_bench import bench_simulated
from kvscope.engine.config import EngineConfig
from kvscope.monitor.ledger.memory_breakdown import GIB_B
from kvscope.monitor.terminal.cli import main
from tests.sources.test_memory_log import WORDINGS

DATA = Path(__file__).parent.parent / "data"
SEED = DATA / "seed-002.log"


def explain(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any], str]:
    code = main(["explain", "memory", "--format", "json", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, json.loads(printed.out), printed.err


def test_the_seed_and_a_heavier_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, report, _ = explain(capsys, "--log", SEED)
    assert code == 0
    suggestions = report["suggestions"]
    for name in ("fit_requested", "use_all"):
        own = report["printed_suggestions"][f"{name}_bytes"]
        assert str(own) in SEED.read_text()
        assert abs(suggestions[f"{name}_bytes"] - own) <= report["rounding_bytes"]
        assert suggestions[f"{name}_short_by_bytes"] == 0
    assert sum(report["parts"].values()) == report["breakdown"]["device_total"]
    heavier = tmp_path / "heavier.log"
    heavier.write_text(SEED.read_text().replace("8.58 GiB for weight", "9.58 GiB for weight"))
    _, report, _ = explain(capsys, heavier)
    for name in ("fit_requested_bytes", "use_all_bytes"):
        assert abs(suggestions[name] - report["suggestions"][name] - GIB_B) <= 1


def test_a_person_reads_the_parts_and_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["explain", "memory", "--log", str(SEED)]) == 0
    printed = capsys.readouterr().out
    for words in ("peak activations", "9.960 GiB", "left free", "more than it was given", "to use all of the device"):
        assert words in printed
    assert max(map(len, printed.splitlines())) <= 80
    heavier = tmp_path / "heavier.log"
    heavier.write_text(SEED.read_text().replace("8.58 GiB for weight", "158.58 GiB for weight"))
    assert main(["explain", "memory", "--log", str(heavier)]) == 0
    printed = capsys.readouterr().out
    assert "cannot be met" in printed
    assert "--kv-cache-memory=-" not in printed


@pytest.mark.parametrize("log", ["startup.log.gz", "startup-refused.log.gz", "seed-000.log"])
def test_a_log_without_a_bill_says_what_is_missing_and_what_there_is(
    capsys: pytest.CaptureFixture[str], log: str
) -> None:
    code, report, error = explain(capsys, "--log", DATA / log)
    assert code == 3
    assert report["suggestions"] is None
    for words in report["missing"]:
        assert words in error
    assert any("Free memory on device" in words for words in report["missing"])
    if log.startswith("startup"):
        sizing = report["sizing"]
        assert sizing["kv_cache_size_tokens"] / sizing["max_model_len"] == sizing["max_concurrency"]


def test_a_wrong_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["explain", "memory", "--log", str(tmp_path / "none.log")]) == 2
    assert main(["explain", "memory", "--log", str(tmp_path)]) == 2
    assert main(["explain", "memory", "--log", str(SEED), str(SEED)]) == 2
    assert "not both" in capsys.readouterr().err


def test_what_there_is_of_a_bill_of_before_vllm_had_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The engine of before V1 says neither what was free at its start nor what graphs take."""
    reported = [
        WORDINGS[f"0.8, the engine of before V1, {what}"] for what in ("what it may use", "what it uses", "weights")
    ]
    log = tmp_path / "old.log"
    log.write_text("\n".join(line for line, _ in reported))
    code, report, error = explain(capsys, log)
    assert code == 3
    assert report["breakdown"] is None
    assert report["sizing"] == {name: value for _, facts in reported for name, value in facts.items()}
    assert "Free memory on device" in error
    main(["explain", "memory", str(log)])
    assert "21.21" in capsys.readouterr().out


def test_the_device_of_an_engine_and_why_the_process_does_not_shrink(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """All requests have ended; the pool is as large as before, and the device's bill is whole."""
    config = EngineConfig(memory_budget=512 << 20, max_model_len=512)
    bench_simulated(BenchLoad(num_prompts=4, input_len=100, output_len=20), config, 12, tmp_path)
    code, report, _ = explain(capsys, tmp_path)
    assert code == 0
    ((engine, known),) = report["engines"].items()
    assert sum(report["devices"][engine].values()) == known["device_total"] == 512 << 20
    assert report["pools"][engine]["bytes"] == report["devices"][engine]["KV cache"] == known["kv_pool"] > 0
    assert report["pools"][engine]["usage"] == 0
    assert main(["explain", "memory", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.replace(str(tmp_path), "run")
    assert "WHY THE PROCESS'S MEMORY DOES NOT FALL" in printed
    stated = " ".join(printed.split())
    assert f"one KV pool of {known['kv_pool'] / GIB_B:.3f} GiB" in stated
    assert "Pool usage now: 0.0 %" in stated
    assert f"device in all {512 / 1024:.3f} GiB" in stated
    assert max(map(len, printed.splitlines())) <= 80


def test_a_log_says_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "memory", "--log", str(SEED)])
    printed = capsys.readouterr().out
    _, report, _ = explain(capsys, "--log", SEED)
    assert f"one KV pool of {report['breakdown']['kv_cache'] / GIB_B:.3f} GiB" in " ".join(printed.split())
