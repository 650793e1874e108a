"""The probe on a scheduler that does what vLLM's own does rarely, or in other releases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope.monitor.events.kinds import Kind
from kvscope.monitor.probes.vllm.blocks_needed import BlocksNeeded
from kvscope.monitor.probes.vllm.front_end_hooks import FrontEndReporter
from kvscope.monitor.probes.vllm.queue_check import CHECKS
from kvscope.monitor.publishing.packer import Vitals
from tests.probes.stand_in import Probed, group, request, scheduler, with_vllm


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    with_vllm(monkeypatch)


# ---------------------------------------------------------------- heartbeats


def test_requests_in_the_front_end_are_those_of_the_scheduler_without_reports_from_there() -> None:
    probed = Probed(scheduler())
    for name in ("a", "b", "c"):
        probed.scheduler.add_request(request(name))
    probed.step({"a": 10}, "a")
    assert probed.probe.vitals() == Vitals(-1, 0, 1, 2, 3, 0, 1)


@pytest.fixture
def front_end(tmp_path: Path) -> Iterator[FrontEndReporter]:
    reporter = FrontEndReporter(lambda _rank: f"ipc://{tmp_path / 'inbox'}", lambda: None)
    yield reporter
    reporter.close()


def test_requests_that_the_front_end_has_received_count_in_it_before_they_arrive(
    tmp_path: Path, front_end: FrontEndReporter
) -> None:
    probed = Probed(scheduler())
    probed.probe.join_front_end(f"ipc://{tmp_path / 'inbox'}")
    front_end.received(SimpleNamespace(request_id="a", prompt_token_ids=[1]))
    deadline = time.monotonic() + 20
    while not probed.probe.vitals().front_end_in_flight:
        assert time.monotonic() < deadline
        probed.probe.check_front_end()
    assert probed.probe.vitals()[2:5] == (0, 0, 1)
    probed.probe.close()


def test_before_the_first_step_batches_are_of_none() -> None:
    probed = Probed(scheduler())
    probed.scheduler.add_request(request("a"))
    assert [batch.last_step for batch in probed.drain().recent] == [-1]
    probed.step({"a": 10}, "a")
    assert probed.drain().recent[-1].last_step == 0


# ---------------------------------------------------------------- requests in no queue


def not_queued(probed: Probed) -> set[str]:
    return {record.id for record in probed.drain().state.requests.values() if record.not_queued_ns}


def test_of_several_requests_only_those_in_no_queue_are_reported_and_only_at_the_third_check() -> None:
    probed = Probed(scheduler())
    for name in ("runs", "waits", "lost"):
        probed.scheduler.add_request(request(name))
    probed.step({"runs": 10}, "runs")
    probed.scheduler.waiting.pop()
    for _ in range(CHECKS - 1):
        probed.probe.vitals()
    assert not_queued(probed) == set()
    probed.probe.vitals()
    assert not_queued(probed) == {"lost"}


@pytest.mark.parametrize("dropped", [True, False])
def test_a_request_in_no_queue_that_has_ended_is_not_reported(dropped: bool) -> None:
    """Its end is reported by the engine's thread, which is on its way."""
    probed = Probed(scheduler())
    probed.scheduler.add_request(request("a"))
    probed.scheduler.waiting.clear()
    if dropped:
        probed.scheduler.requests.clear()
    else:
        probed.scheduler.requests["a"] = request("a", "FINISHED_STOPPED")
    for _ in range(CHECKS):
        probed.probe.vitals()
    assert not_queued(probed) == set()


# ---------------------------------------------------------------- blocks that a request needs


def spec(kind: str, **attributes: Any) -> Any:
    return type(kind, (), attributes)()


@pytest.mark.parametrize(
    ("one", "blocks"),
    [
        (spec("FullAttentionSpec"), 250),
        (spec("FullAttentionSpec", sliding_window=64), 250),  # with the hybrid manager off
        (spec("SlidingWindowSpec", sliding_window=64), 37),
        (spec("ChunkedLocalAttentionSpec", attention_chunk_size=64), 37),
        (spec("MambaSpec", mamba_cache_mode="none"), 1),
        (spec("MambaSpec", mamba_cache_mode="align"), 2),
        (spec("MambaSpec", mamba_cache_mode="all"), 250),
    ],
)
def test_a_prompt_never_holds_more_blocks_than_its_layers_keep(one: Any, blocks: int) -> None:
    """4,000 tokens in blocks of 16. 64 tokens and a step of 512 are in 36 blocks, or 37 where they begin within one."""
    assert BlocksNeeded(scheduler(groups=[group(spec=one)])).from_scratch(4_000) == blocks


def test_a_release_without_watermark_lookahead_or_alignment_has_none() -> None:
    made = scheduler(running=[request("other")], scheduler_reserve_full_isl=True)
    needed, asked = BlocksNeeded(made), made.kv_cache_manager.coordinator.asked
    one = request("a", num_tokens=160, num_prompt_tokens=160)
    assert needed.chunk(one, 64, 0) == 64
    assert needed.to_admit(one, 64, (needed.no_blocks, 0), 0) == 10
    assert asked == [{"tokens": 160, "encoder": 0, "capped": True}, {"tokens": 64, "encoder": 0, "capped": False}]
    running = request("b", num_computed_tokens=32)
    assert needed.to_grow(running, 16) == 3
    assert asked[-1] == {"tokens": 48, "encoder": 0, "capped": False}


# ---------------------------------------------------------------- steps


def steps(probed: Probed) -> list[tuple[list[int], list[int]]]:
    """The numbers of the requests of each step, and the tokens of each."""
    events = [event for batch in probed.drain().recent for event in batch.events()]
    return [(event.ids, event.args[2:]) for event in events if event.kind == Kind.STEP_LAUNCHED]


def test_a_step_in_which_all_decode_has_a_token_of_each() -> None:
    probed = Probed(scheduler())
    for name in ("a", "b"):
        probed.scheduler.add_request(request(name))
    probed.step({"a": 10, "b": 10}, "a", "b")
    for name in ("a", "b"):
        probed.scheduler.requests[name].num_output_tokens = 1
    for _ in range(2):
        probed.step({"a": 1, "b": 1})
    probed.step({"b": 1})
    assert steps(probed) == [([1, 2], [10, 10]), ([1, 2], [1, 1]), ([1, 2], [1, 1]), ([2], [1])]


@pytest.mark.parametrize(
    ("fields", "looked_up"),
    [
        ({"skip_reading_prefix_cache": False}, True),
        ({"skip_reading_prefix_cache": True}, False),
        ({"sampling_params": SimpleNamespace(prompt_logprobs=None)}, True),
        ({"sampling_params": SimpleNamespace(prompt_logprobs=0)}, False),
        ({}, True),
    ],
)
def test_a_prompt_is_looked_up_unless_its_log_probabilities_are_asked_for(
    fields: dict[str, Any], looked_up: bool
) -> None:
    """Newer releases say so of each request."""
    probed = Probed(scheduler())
    probed.scheduler.add_request(request("a", **fields))
    probed.step({"a": 10}, "a")
    assert probed.drain().state.requests[1].looked_up_tokens == (10 if looked_up else 0)


def test_of_steps_in_flight_only_those_with_a_request_compute_tokens_of_it() -> None:
    """As releases up to 0.25 need it, whose requests do not count that."""
    made = scheduler()
    probed = Probed(made)
    for name in ("a", "b"):
        made.add_request(request(name))
    probed.step({"a": 10}, "a")
    made.plan = made.plan._replace(num_scheduled_tokens={"a": 1}, scheduled_new_reqs=())
    made.schedule()
    assert [probed.probe.state.in_flight(made.requests[name]) for name in ("a", "b")] == [1, 0]


# ---------------------------------------------------------------- blocks that no request takes


def test_blocks_that_something_other_than_a_request_takes_are_pinned_until_it_frees_them() -> None:
    made = scheduler()
    probed, pool = Probed(made), made.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(2)
    pool.touch(taken[:1])
    assert [probed.drain().state.refs[block.block_id] for block in taken] == [2, 1]
    for _ in range(2):
        pool.free_blocks(taken[:1])
    for _ in range(10):
        probed.step({})
    state = probed.drain().state
    assert [state.refs[block.block_id] for block in taken] == [0, 1]
    assert state.audit_cycles
    assert probed.ledger.balance().holds
    assert probed.ledger.balance().unaccounted == 0
    assert not probed.ledger.anomalies
    assert not probed.ledger.losses


def test_a_block_freed_once_too_often_by_no_request_is_corruption() -> None:
    made = scheduler()
    probed, pool = Probed(made), made.kv_cache_manager.block_pool
    made.add_request(request("a"))
    (block,) = made.kv_cache_manager.coordinator.single_type_managers[0].allocate("a", pool, 1)
    pool.free_blocks([block])
    ledger = probed.drain()
    assert ledger.anomalies[0].anomaly.block == block.block_id
    assert not ledger.losses


def test_a_reference_that_was_taken_without_the_pool_is_counted_as_missed() -> None:
    made = scheduler()
    probed, pool = Probed(made), made.kv_cache_manager.block_pool
    made.add_request(request("a"))
    (block,) = made.kv_cache_manager.coordinator.single_type_managers[0].allocate("a", pool, 1)
    block.ref_cnt += 1
    pool.free_blocks([block])
    ledger = probed.drain()
    assert (len(ledger.anomalies), len(ledger.losses)) == (0, 1)
