"""A plan from what was measured: a recording, a log, a metrics page; and its JSON against the committed schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvscope.engine.bench.load_bench import BenchLoad
from kvscope.engine.bench.simulated_bench import bench_simulated
from kvscope.engine.config import EngineConfig
from kvscope.lab.recorded_pages import served, whole_page
from kvscope.monitor.base.errors import BadQuestion
from kvscope.monitor.planning import plan_types
from kvscope.monitor.planning.plan_request import PlanRequest, load_in_plan, plan_from_request
from kvscope.monitor.planning.plan_types import PlanInput, plan_schema
from kvscope.monitor.terminal.cli import main

DATA = Path(__file__).parent.parent / "data"
SCHEMA = json.loads((Path(plan_types.__file__).parent / "plan.schema.json").read_text())
GIB = 1 << 30


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["plan", *map(str, arguments), "--format", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, SCHEMA)
    return found


def inputs_of(plan: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    return {one["name"]: (one["value"], one["origin"]) for one in plan["inputs"]}


def test_the_committed_schema_is_that_of_the_plan() -> None:
    assert plan_schema() == SCHEMA
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": "gpt2"}, SCHEMA)


def test_a_recording_supplies_lengths_hits_and_the_pool(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = EngineConfig(block_size=16, max_model_len=512, num_gpu_blocks_override=200)
    bench_simulated(BenchLoad(num_prompts=6, input_len=100, output_len=20), config, 12, tmp_path)
    found = planned(capsys, "--from", tmp_path)
    inputs = inputs_of(found)
    assert inputs["prompt length"] == (100, "measured")
    assert inputs["output length"] == (20, "measured")
    assert inputs["concurrency"][1] == "measured"
    assert (found["blocks"], found["blocks_per_request"], found["requests_at_once"]) == (200, 8, 199 // 8)
    longer = planned(capsys, "--from", tmp_path, "--output-len", 60)
    assert inputs_of(longer)["output length"] == (60, "given")
    assert longer["blocks_per_request"] == 10


def test_another_model_is_planned_with_the_load_of_a_recording(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = EngineConfig(block_size=16, max_model_len=512, num_gpu_blocks_override=200)
    bench_simulated(BenchLoad(num_prompts=6, input_len=100, output_len=20), config, 12, tmp_path)
    found = planned(capsys, "gpt2", "--from", tmp_path, "--device-memory", "16G")
    assert found["model"] == "gpt2"
    assert inputs_of(found)["prompt length"] == (100, "measured")
    assert inputs_of(found)["device memory"] == (16 * GIB, "given")
    assert inputs_of(found)["other memory"] == (2 * GIB, "assumed")


def test_a_log_supplies_concurrency_and_the_pool_and_no_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--from", DATA / "healthy-shared-prefix.log.gz")
    inputs = inputs_of(found)
    assert inputs["concurrency"] == (12, "measured")
    assert inputs["blocks"] == (513, "measured")
    assert "prompt length" not in inputs
    assert (found["pool_tokens"], found["max_concurrency"]) == (16416, 513 / 256)


@pytest.mark.slow
def test_a_metrics_page_supplies_mean_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    page = whole_page()
    sums = {
        name: float(line.rpartition(" ")[2])
        for name in ("prompt_tokens_sum", "prompt_tokens_count", "generation_tokens_sum")
        for line in page.splitlines()
        if line.startswith(f"vllm:request_{name}{{")
    }
    with served(page) as server:
        found = planned(capsys, "--from", f"{server.url}")
    inputs = inputs_of(found)
    assert inputs["prompt length"] == (round(sums["prompt_tokens_sum"] / sums["prompt_tokens_count"]), "measured")
    assert inputs["output length"] == (round(sums["generation_tokens_sum"] / sums["prompt_tokens_count"]), "measured")
    assert found["blocks"] == 513


def test_only_measured_inputs_are_taken_from_another_plan() -> None:
    plan = plan_from_request(PlanRequest(model="gpt2", kv_cache_memory=GIB, prompt_len=100))
    assert load_in_plan(plan) is None
    assert PlanInput("prompt length", 100, "tokens", "given") in plan.inputs


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (PlanRequest(model="novel"), "does not know the model novel: give its config.json"),
        (PlanRequest(layers=2, kv_heads=2), "give a MODEL, or --layers, --kv-heads and --head-dim"),
        (PlanRequest(), "give a MODEL"),
        (PlanRequest(model="gpt2", kv_cache_memory=-1), "--kv-cache-memory is -1: a size is at least 0"),
        (PlanRequest(model="gpt2", kv_cache_memory=GIB, prompt_len=-4), "--prompt-len is -4"),
    ],
)
def test_an_input_that_makes_no_sense_gets_a_sentence(request_: PlanRequest, sentence: str) -> None:
    with pytest.raises(BadQuestion, match=sentence.split(":")[0]):
        plan_from_request(request_)


def test_settings_state_their_cost_and_the_one_that_limits() -> None:
    asked = PlanRequest(model="gpt2", device_memory=16 * GIB, prompt_len=500, output_len=100)
    by_blocks = {one.flag: one for one in plan_from_request(asked).settings}
    assert set(by_blocks) == {
        "--max-model-len",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--kv-cache-memory-bytes",
        "--gpu-memory-utilization",
        "--mem-fraction-static",
    }
    assert all(one.costs for one in by_blocks.values())
    assert by_blocks["--kv-cache-memory-bytes"].limits
    assert not by_blocks["--max-num-seqs"].limits
    few = PlanRequest(model="gpt2", device_memory=16 * GIB, prompt_len=500, output_len=100, max_num_seqs=8)
    by_sequences = {one.flag: one for one in plan_from_request(few).settings}
    assert by_sequences["--max-num-seqs"].limits
    assert not by_sequences["--kv-cache-memory-bytes"].limits
