"""The probe on vLLM's own scheduler: after every step its events add up to vLLM's own tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvscope.monitor.events.kinds import Cause, Status
from kvscope.monitor.events.trace_context import parse_traceparent
from kvscope.monitor.events.wire import Batch, decode
from kvscope.monitor.ledger.balance import balance_of
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from tests.probes.bare_scheduler import ENGINE, traceparent
from tests.probes.connector_settings import CONNECTOR
from tests.probes.vllm_python import RELEASES, needs_vllm, run, save_model

LIVES: dict[str, dict[str, Any]] = {
    "one step at a time": {"steps": 2000},
    "many steps at a time": {"steps": 2000, "every": 41, "seed": 6},
    "a step ahead": {"steps": 600, "a_step_ahead": True, "seed": 1},
    "by priority": {"steps": 600, "scheduling_policy": "priority", "seed": 2},
    "preempted within schedule": {"steps": 600, "preempts_within": True, "seed": 8},
    "few LoRA slots": {"steps": 250, "loras": 2, "seed": 11},
    "pauses": {"steps": 250, "pauses": True, "seed": 12},
    "sliding windows": {"steps": 250, "windows": [64, 100], "seed": 13, "blocks": 200},
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
OUTSIDE = (
    Status.WAITING_FOR_REMOTE_KVS,
    Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    Status.WAITING_FOR_STREAMING_REQ,
)


def records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        while size := file.read(4):
            yield msgspec.msgpack.decode(file.read(int.from_bytes(size, "little")))


@pytest.fixture(scope="module", params=RELEASES, ids=[release or "installed" for release in RELEASES])
def lives(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """What happened in all of them: one process, since vLLM takes ten seconds to import."""
    directory = tmp_path_factory.mktemp("lives")
    arguments = str(save_model(directory / "model")), str(directory), json.dumps(LIVES)
    run("tests.probes.bare_scheduler", *arguments, release=request.param)
    return directory


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("life", LIVES)
def test_events_add_up_to_the_tables_of_vllm_after_every_step(life: str, lives: Path) -> None:
    ledger = EngineLedger(ENGINE)
    seen: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    for record in records(lives / life):
        for payload in record["frames"]:
            frame = decode(payload)
            assert isinstance(frame, Batch)
            assert (frame.free, frame.used) == (record["free"], frame.total - 1 - record["free"])
            ledger.apply(frame)
        state = ledger.state
        assert not ledger.anomalies
        assert record["errors"] == frame.dropped_batches == 0
        # The null block is vLLM's own, and reserved.
        assert list(state.refs[1:]) == record["refs"][1:]
        assert [bool(value) for value in state.hashes[1:]] == record["hashed"][1:]
        assert state.used == frame.used
        assert balance_of(state).holds
        assert not state.unexplained_references()
        seen["behind a fence"] += len(state.detached)
        by_name = {r.id: r for r in state.requests.values()}
        tables = {name.rpartition("-")[0]: blocks for name, blocks in record["tables"].items() if blocks}
        assert {name: sorted(r.blocks) for name, r in by_name.items() if r.blocks} == {
            name: sorted(blocks) for name, blocks in tables.items()
        }
        for name, status in record["statuses"].items():
            if (told := by_name.get(name.rpartition("-")[0])) is not None:
                assert Status(told.status).name == status, name
                seen[status] += 1
                if record["scheduled"] and (cause := record["decisions"].get(name)) and told.is_waiting:
                    assert Cause(told.cause).name == cause or told.status in OUTSIDE, (name, cause)
                    causes[cause] += 1
                    assert cause != "KV_BLOCKS" or told.blocks_needed > told.blocks_free_then
            else:
                assert status.startswith("FINISHED")  # it holds nothing any more; its connector has yet to say so
    assert {r.id: r.trace for r in ledger.ended if r.trace} == {
        r.id: parse_traceparent(traceparent(int(r.id.rpartition("-")[2]) + 1)) for r in ledger.ended if r.trace
    }
    assert sum(r.trace is not None for r in ledger.ended) > len(ledger.ended) / 4
    totals = state.totals
    assert state.audit_cycles > 0
    assert totals.evicted > 0 or life == "no prefix cache"
    assert totals.hit_tokens > 0 or life == "no prefix cache"
    assert totals.preemptions or "connector" in life or "LoRA" in life
    assert causes["MAX_NUM_SEQS"] or life in ("sliding windows", "no prefix cache")
    assert causes["KV_BLOCKS"] or "connector" in life
    assert bool(causes["LORA"]) == ("LoRA" in life)
    assert bool(causes["CONNECTOR"]) == ("connector" in life)
    assert seen["RUNNING"]
    assert seen["WAITING"]
    # Releases from 0.24 on keep blocks until the steps in flight that may write them are over.
    if life == "a connector, a step ahead":
        assert bool(seen["behind a fence"]) == record["fences"]
    if "connector" in life:
        assert seen["WAITING_FOR_REMOTE_KVS"]
        held = [d for d in state.deferrals.values() if "keep" in d.id]
        assert held
        assert {d.id for d in held} == {r.id for r in state.requests.values() if r.is_finished and "keep" in r.id}
