"""Settings with which a refused start fits: the plan's numbers in doctor's findings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvscope.monitor.planning.known_models import KNOWN_MODELS, known_model
from kvscope.monitor.planning.model_shape import shape_of
from kvscope.monitor.planning.start_remedies import RefusedNumbers, start_remedies
from kvscope.monitor.terminal.cli import main

DATA = Path(__file__).parent.parent / "data"
GPT2_PAGE = """KV cache is the bottleneck. Let's serve a small language model.
llm = LLM(model="gpt2", gpu_memory_utilization=0.70)
When you run this, vLLM allocates a significant chunk of your GPU memory to store the KV cache.
"""


def advice(capsys: pytest.CaptureFixture[str], path: Path, code: str) -> str:
    main(["doctor", "--format", "json", str(path)])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    (finding,) = (one for one in report["findings"] if one["code"] == code)
    return " ".join(finding["advice"]["do_now"] if "advice" in finding else finding["do_now"])


def test_a_length_above_the_pool_gets_the_length_that_fits_and_that_of_eight_bits() -> None:
    start = RefusedNumbers(length=131072, needed=16.0, available=8.67, fitting=71_000)
    first, second = start_remedies(start)
    assert "--max-model-len 71000" in first
    assert "(--kv-cache-dtype fp8) at the full 131,072 tokens" in first
    assert "lacks the device's memory" in second
    assert "--device-memory SIZE" in second


def test_with_the_device_stated_the_share_follows() -> None:
    start = RefusedNumbers(length=131072, needed=16.0, available=8.0, fitting=65_536, device=80.0, requested=64.0)
    assert "--gpu-memory-utilization 0.90 holds the whole length: 72.00 of" in start_remedies(start)[1]
    full = RefusedNumbers(length=131072, needed=32.0, available=8.0, fitting=32_768, device=80.0, requested=72.0)
    first, second = start_remedies(full)
    assert "at 65,536 tokens" in first
    assert second.startswith("No --gpu-memory-utilization holds the whole length")


def test_eight_bits_are_not_advised_twice() -> None:
    start = RefusedNumbers(length=221_000, needed=10.12, available=5.59, fitting=122_080, is_eight_bit=True)
    assert "--kv-cache-dtype" not in " ".join(start_remedies(start))


def test_memory_that_others_hold_gets_the_share_that_is_free() -> None:
    start = RefusedNumbers(free=40.0, device=80.0, requested=72.0)
    assert "--gpu-memory-utilization 0.50 (40.00 of 80.00 GiB), or once 32.00 GiB more" in start_remedies(start)[0]


def test_a_start_without_a_pool_gets_the_share_or_the_missing_number() -> None:
    start = RefusedNumbers(is_pool_empty=True, available=-1.27, device=24.0, requested=12.0)
    assert "--gpu-memory-utilization 0.56 leaves the first block" in start_remedies(start)[0]
    assert "lacks the weights" in start_remedies(RefusedNumbers(is_pool_empty=True))[-1]


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        ("027-kaito-2132", "--max-model-len 810208, or with KV in 8 instead of 16 bits (--kv-cache-dtype fp8) at the"),
        ("025-vllm-2418", "--max-model-len 3664, or"),
        ("023-arc-cookbook-4", "lacks the device's memory"),
        ("030-vllm-10439", "lacks the weights"),
    ],
)
def test_refused_starts_of_public_reports_end_with_the_plan(
    capsys: pytest.CaptureFixture[str], report: str, sentence: str
) -> None:
    assert sentence in advice(capsys, DATA / "reports" / report / "report.txt", "sizing.refused-start")


def test_seed_002_names_the_share_of_graphs_and_the_pool_of_its_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The bill is of gemma-3-4b-it; a later comment of the thread serves Llama 4."""
    thread = tmp_path / "thread.txt"
    printed = (DATA / "seed-002.log").read_text()
    thread.write_text(
        "The estimation does not include CUDAGraph memory, so it OOM when gpu-memory-utilization=0.99.\n"
        "With `vllm bench latency --model google/gemma-3-4b-it`, there would be a log:\n\n"
        f"{printed}\nThis means vllm serve meta-llama/Meta-Llama-3-8B --gpu-memory-utilization 0.99 is going to OOM.\n"
    )
    found = advice(capsys, thread, "sizing.kv-too-large")
    assert "Graphs take 0.65 GiB, 0.4 % of the device" in found
    (suggested,) = (word.rstrip(":") for word in found.split() if word.rstrip(":").isdecimal() and len(word) > 9)
    assert abs(int(suggested) - 151519866880) <= 0.025 * (1 << 30)
    assert "Plan for google/gemma-3-4b-it on one device: 141.12 GiB" in found
    assert "Meta-Llama" not in found


def test_a_page_on_gpt2_gets_the_plan_for_both_shares(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text(GPT2_PAGE)
    found = advice(capsys, page, "held.pool-reserved")
    assert "monitor plan gpt2 --device-memory SIZE" in found
    assert "--gpu-memory-utilization 0.70 and --gpu-memory-utilization 0.90" in found


def test_known_models_are_read_and_others_are_not_guessed() -> None:
    for name, model in KNOWN_MODELS.items():
        assert known_model(f"org/{name.upper()}-Instruct") is model
        assert shape_of(model.config).assumed == ()
    assert known_model("org/llama-3.1-8b-vision") is None
