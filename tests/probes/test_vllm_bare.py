"""The probe on vLLM's own scheduler: after every step its events add up to vLLM's own tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvscope.lab.vllm_python import RELEASES, needs_vllm, run, save_model
from kvscope.monitor.contract.trace_context import parse_traceparent
from tests.probes.bare_scheduler import traceparent
from tests.probes.connector_settings import CONNECTOR
from tests.probes.run_check import check_run

RANDOM_RUNS: dict[str, dict[str, Any]] = {
    "one step at a time": {"steps": 2000},
    "many steps at a time": {"steps": 2000, "every": 41, "seed": 6},
    "a step ahead": {"steps": 600, "a_step_ahead": True, "seed": 1},
    "by priority": {"steps": 600, "scheduling_policy": "priority", "seed": 2},
    "preempted within schedule": {"steps": 600, "preempts_within": True, "seed": 8},
    "few LoRA slots": {"steps": 250, "loras": 2, "seed": 11},
    "pauses": {"steps": 250, "loads": ["pauses"], "seed": 12},
    "sliding windows": {
        "steps": 250,
        "groups": [["full"], ["sliding", 64], ["sliding", 100]],
        "seed": 13,
        "blocks": 200,
    },
    "two pools, no prefix cache": {
        "steps": 250,
        "groups": [["full"], ["sliding", 64]],
        "own_pool": True,
        "enable_prefix_caching": False,
        "seed": 14,
        "blocks": 110,
    },
    "no prefix cache": {"steps": 300, "a_step_ahead": True, "enable_prefix_caching": False, "seed": 3},
    "a connector": {"steps": 900, "kv_transfer_config": CONNECTOR, "seed": 4, "blocks": 240},
    "a connector, a step ahead": {
        "steps": 900,
        "a_step_ahead": True,
        "kv_transfer_config": CONNECTOR,
        "seed": 5,
        "blocks": 240,
    },
    "a connector, many steps at a time": {
        "steps": 1200,
        "a_step_ahead": True,
        "kv_transfer_config": CONNECTOR,
        "seed": 7,
        "blocks": 240,
        "every": 17,
    },
}


@pytest.fixture(scope="module", params=RELEASES, ids=[release or "installed" for release in RELEASES])
def random_runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """What happened in all of them: one process, since vLLM takes ten seconds to import."""
    directory = tmp_path_factory.mktemp("lives")
    arguments = str(save_model(directory / "model")), str(directory), json.dumps(RANDOM_RUNS)
    run("tests.probes.bare_scheduler", *arguments, release=request.param)
    return directory


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("life", RANDOM_RUNS)
def test_events_add_up_to_the_tables_of_vllm_after_every_step(life: str, random_runs: Path) -> None:
    checked = check_run(random_runs / life)
    ledger, seen, causes = checked.ledger, checked.seen, checked.causes
    state = ledger.state
    assert {r.id: r.trace for r in ledger.ended if r.trace} == {
        r.id: parse_traceparent(traceparent(int(r.id.rpartition("-")[2]) + 1)) for r in ledger.ended if r.trace
    }
    assert sum(r.trace is not None for r in ledger.ended) > len(ledger.ended) / 4
    totals = state.totals
    assert state.audit_cycles > 0
    assert totals.evicted > 0 or "no prefix cache" in life
    assert totals.hit_tokens > 0 or "no prefix cache" in life
    # With two pools of unequal use, requests are refused on admission before those that run become short of blocks.
    assert totals.preemptions or "connector" in life or "LoRA" in life or "two pools" in life
    assert causes["MAX_NUM_SEQS"] or life == "sliding windows" or "no prefix cache" in life
    assert causes["KV_BLOCKS"] or "connector" in life
    assert bool(causes["LORA"]) == ("LoRA" in life)
    assert bool(causes["CONNECTOR"]) == ("connector" in life)
    assert seen["RUNNING"]
    assert seen["WAITING"]
    # Releases from 0.24 on keep blocks until the steps in flight that may write them are over.
    if life == "a connector, a step ahead":
        assert bool(seen["behind a fence"]) == checked.fences
    if "connector" in life:
        assert seen["WAITING_FOR_REMOTE_KVS"]
        held = [d for d in state.deferrals.values() if "keep" in d.id]
        assert held
        assert {d.id for d in held} == {r.id for r in state.requests.values() if r.is_finished and "keep" in r.id}
