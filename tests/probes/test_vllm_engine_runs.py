"""Random runs of vLLM's LLMEngine in one process: ledger, tables and causes are compared after every step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvscope.lab.vllm_python import MODEL, needs_vllm, run, save_model
from tests.probes.connector_settings import CONNECTOR
from tests.probes.model_shapes import HYBRID, TWO_WINDOWS, WINDOWED, save_shape
from tests.probes.run_check import check_run

STEPS = 250
SMALL = {"num_gpu_blocks_override": 60, "block_size": 32, "max_num_seqs": 5}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
RUNS: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "plain": (MODEL, ["resets", "pauses"], SMALL),
    "by priority": (MODEL, ["sessions"], SMALL | {"scheduling_policy": "priority"}),
    "a connector": (MODEL, ["pauses"], SMALL | {"num_gpu_blocks_override": 120, "kv_transfer_config": CONNECTOR}),
    "a connector by priority": (
        MODEL,
        [],
        SMALL | {"num_gpu_blocks_override": 120, "kv_transfer_config": CONNECTOR, "scheduling_policy": "priority"},
    ),
    "drafts": (MODEL, ["resets"], SMALL | {"speculative_config": NGRAM}),
    "drafts, sessions and pauses": (MODEL, ["sessions", "pauses"], SMALL | {"speculative_config": NGRAM}),
    "a window": (WINDOWED, ["sessions", "resets"], SMALL),
    "two window groups": (TWO_WINDOWS, ["pauses", "resets"], SMALL | {"num_gpu_blocks_override": 120}),
    "a hybrid": (HYBRID, ["pauses"], {"num_gpu_blocks_override": 120, "max_num_seqs": 5}),
    "sessions without a prefix cache": (MODEL, ["sessions"], SMALL | {"enable_prefix_caching": False}),
}
IN_CI = ("a connector", "drafts, sessions and pauses")


@needs_vllm
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in IN_CI else pytest.mark.prove) for name in RUNS]
)
def test_an_engine_in_one_process_adds_up_after_every_step(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, acts, settings = RUNS[name]
    model = save_model(tmp_path / "model")
    save_shape(model, config)
    of_run = settings | {"acts": acts, "steps": STEPS, "seed": list(RUNS).index(name)}
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": ""}
    run("tests.probes.one_process_runs", str(model), str(tmp_path / "run"), json.dumps(of_run), **more)
    checked = check_run(tmp_path / "run")
    with capsys.disabled():
        print(f"\nLLMEngine, {name}: {checked.calls} steps and {checked.causes.total()} causes compared, 0 differences")
    assert checked.calls >= STEPS
    assert checked.ledger.state.audit_cycles > 0
    assert checked.seen["RUNNING"] > STEPS
    assert "UNKNOWN" not in checked.causes
    assert checked.causes.total() > 0
    assert ("sessions" in acts) == bool(checked.seen["WAITING_FOR_STREAMING_REQ"])
    assert ("kv_transfer_config" in settings) == bool(checked.seen["WAITING_FOR_REMOTE_KVS"])
