"""The probe on a scheduler that does what vLLM's own does rarely, or in other releases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope.monitor.contract.kinds import Kind, Release, Status
from kvscope.monitor.detectors.corrupt.anomalies import DoubleFree
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.ledger.records import AnomalyKind
from kvscope.monitor.probes.packer import Vitals
from kvscope.monitor.probes.vllm.blocks_needed import BlocksNeeded
from kvscope.monitor.probes.vllm.front_end_hooks import FrontEndReporter
from kvscope.monitor.probes.vllm.table_reader import CHECKS
from tests.probes.stand_in import Probed, group, request, scheduler, with_vllm
from tests.waiting import PATIENCE_S


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


@pytest.mark.usefixtures("real_parts")
def test_requests_that_the_front_end_has_received_count_in_it_before_they_arrive(
    tmp_path: Path, front_end: FrontEndReporter
) -> None:
    probed = Probed(scheduler())
    probed.probe.join_front_end(f"ipc://{tmp_path / 'inbox'}")
    front_end.received(SimpleNamespace(request_id="a", prompt_token_ids=[1]))
    deadline = time.monotonic() + PATIENCE_S
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
    reported = [event.kind for batch in probed.drain().recent for event in batch.events()]
    assert Kind.NOT_QUEUED not in reported


# ---------------------------------------------------------------- blocks that a request needs


def spec(kind: str, **attributes: Any) -> Any:
    return type(kind, (), attributes)()


@pytest.mark.parametrize(
    ("one", "blocks"),
    [
        (spec("FullAttentionSpec"), 250),
        (spec("FullAttentionSpec", sliding_window=66), 250),  # with the hybrid manager off
        (spec("SlidingWindowSpec", sliding_window=66), 38),
        (spec("ChunkedLocalAttentionSpec", attention_chunk_size=66), 38),
        (spec("MambaSpec", mamba_cache_mode="none"), 1),
        (spec("MambaSpec", mamba_cache_mode="align"), 2),
        (spec("MambaSpec", mamba_cache_mode="all"), 250),
    ],
)
def test_a_prompt_never_holds_more_blocks_than_its_layers_keep(one: Any, blocks: int) -> None:
    """4,000 tokens in blocks of 16. 65 tokens before a step of 512 are in 37 blocks, or 38 if they begin within one."""
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


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("seconds", [0.001, 1.0])
def test_a_step_in_which_all_decode_has_the_tokens_of_each(drafts: int, seconds: float) -> None:
    """Its events are written with those of other steps where steps are short."""
    probed, each = Probed(scheduler()), 1 + drafts
    requests = [probed.arrive(name) for name in ("a", "b")]
    probed.step({"a": 10, "b": 10}, "a", "b", seconds=seconds)
    for one in requests:
        one.num_output_tokens = 1
    for _ in range(4):
        probed.step({"a": each, "b": each}, seconds=seconds)
    probed.step({"b": 1}, seconds=seconds)
    assert steps(probed) == [([1, 2], [10, 10]), *[([1, 2], [each, each])] * 4, ([2], [1])]


def test_a_large_step_is_reported_before_it_runs() -> None:
    """Usual ones are handed over every 10 ms."""
    probed = Probed(scheduler())
    probed.arrive("a").num_output_tokens = 1
    probed.step({"a": 10}, "a", seconds=0.001)
    probed.step({"a": 1}, seconds=0.001)
    assert len(probed.received().state.in_flight) == 1, "the first step's end waits for the next batch"
    probed.arrive("b")
    probed.launch({"a": 1, "b": 400}, "b")
    assert [step.step for step in probed.received().state.in_flight.values()] == [2]


def test_in_a_pause_the_end_of_a_step_is_reported_at_once() -> None:
    """No pass may follow."""
    probed = Probed(scheduler(_pause_state=SimpleNamespace(name="PAUSED_ALL")))
    probed.arrive("a").num_output_tokens = 1
    probed.step({"a": 10}, "a", seconds=0.001)
    assert not probed.received().state.in_flight


def test_events_between_two_passes_have_their_own_time() -> None:
    made = scheduler()
    probed, pool = Probed(made), made.kv_cache_manager.block_pool
    for name in ("a", "b"):
        probed.arrive(name)
        made.kv_cache_manager.group.allocate(name, pool, 1)
    probed.step({"a": 10, "b": 10}, "a", "b")
    probed.clock.sleep(5)
    (pinned,) = pool.get_new_blocks(1)
    at_ns = probed.clock.monotonic_ns()
    assert probed.drain().state.pinned == {pinned.block_id: at_ns}
    probed.clock.sleep(5)
    made.finish_requests("a")
    assert [record.finished_ns for record in probed.drain().ended] == [at_ns + 5 * 10**9]


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
    (block,) = made.kv_cache_manager.group.allocate("a", pool, 1)
    pool.free_blocks([block])
    ledger = probed.drain()
    assert ledger.anomalies[0].anomaly.blocks == [block.block_id]
    assert not ledger.losses


def test_a_request_that_frees_its_blocks_again_after_its_end_is_named() -> None:
    made = scheduler()
    probed, manager, pool = Probed(made), made.kv_cache_manager.group, made.kv_cache_manager.block_pool
    made.add_request(request("a"))
    made.add_request(request("b"))
    freed = manager.allocate("a", pool, 2)
    made.finish_requests("a")
    assert manager.allocate("b", pool, 1)[0] in freed
    manager.req_to_blocks["a"] = freed
    manager.free("a", pool)
    (judgement,) = DoubleFree().detect(probed.drain(), Settings())
    assert judgement.requests == ("a",)
    assert sorted(judgement.blocks) == sorted(block.block_id for block in freed)
    assert any("owned by b" in str(line.value) for line in judgement.evidence)


def test_a_reference_that_was_taken_without_the_pool_is_counted_as_missed() -> None:
    made = scheduler()
    probed, pool = Probed(made), made.kv_cache_manager.block_pool
    made.add_request(request("a"))
    (block,) = made.kv_cache_manager.group.allocate("a", pool, 1)
    block.ref_cnt += 1
    pool.free_blocks([block])
    ledger = probed.drain()
    assert (len(ledger.anomalies), len(ledger.losses)) == (0, 1)


def test_a_block_that_a_plugin_freed_is_no_longer_pinned() -> None:
    """Its next owner's loss is not taken for an unpinned block."""
    made = scheduler()
    probed, pool = Probed(made), made.kv_cache_manager.block_pool
    pool.free_blocks(pool.get_new_blocks(1))
    probed.arrive("a")
    blocks = made.kv_cache_manager.group.allocate("a", pool, 1)
    pool.free_blocks(blocks)
    assert probed.drain().anomalies[0].anomaly.kind is not AnomalyKind.NEVER_PINNED


def test_after_a_missed_reference_an_audit_takes_no_lost_block_for_an_earlier_pin() -> None:
    """A plugin had it and freed it, before the request that loses it."""
    made = scheduler()
    probed, pool, group = Probed(made), made.kv_cache_manager.block_pool, made.kv_cache_manager.group
    pool.free_blocks(pool.get_new_blocks(2))
    for name in ("runs", "loses"):
        probed.arrive(name)
        (block,) = group.allocate(name, pool, 1)
    group.req_to_blocks["loses"].clear()
    made.finish_requests("loses")
    (of_first,) = group.req_to_blocks["runs"]
    of_first.ref_cnt += 1
    pool.free_blocks([of_first])
    for _ in range(20):
        probed.step({})
    ledger = probed.drain()
    assert (len(ledger.losses), ledger.state.damaged) == (1, False)
    assert ledger.balance().holds
    assert ledger.state.unaccounted() == [block.block_id]


def test_blocks_that_wait_for_a_step_are_freed_after_it() -> None:
    made = scheduler()
    probed, pool = Probed(made), made.kv_cache_manager.block_pool
    one = probed.arrive("a")
    made.kv_cache_manager.group.allocate("a", pool, 2)
    blocks = made.kv_cache_manager.pop_blocks_for_free(one)
    state = probed.drain().state
    assert sorted(state.detached) == sorted(block.block_id for block in blocks)
    pool.free_blocks(blocks)
    ledger = probed.drain()
    assert (ledger.state.detached, ledger.balance().free) == ({}, 19)
    assert not ledger.anomalies
    assert not ledger.losses


def test_a_moved_prefix_without_a_request_is_counted_as_missed() -> None:
    made = scheduler()
    probed, pool = Probed(made), made.kv_cache_manager.block_pool
    source, copy = pool.get_new_blocks(2)
    pool.move_block_hashes(source, copy)
    assert len(probed.drain().losses) == 1


# ---------------------------------------------------------------- transfers


def test_blocks_that_a_connector_keeps_are_its_own_until_it_has_sent_them() -> None:
    made = scheduler(keeps={"kept"})
    probed, pool = Probed(made), made.kv_cache_manager.block_pool
    requests = {name: probed.arrive(name) for name in ("kept", "plain")}
    for name in requests:
        made.kv_cache_manager.group.allocate(name, pool, 1)
        made.finish_requests(name)
    state = probed.drain().state
    assert [deferral.id for deferral in state.deferrals.values()] == ["kept"]
    made._free_blocks(requests["kept"])
    ledger = probed.drain()
    assert not ledger.state.deferrals
    assert ledger.state.totals.released == {Release.ABORTED: 1, Release.TRANSFER_DONE: 1}


def test_a_request_that_got_blocks_and_no_tokens_waits_for_its_fetch_until_that_is_reported() -> None:
    made = scheduler()
    probed = Probed(made)
    one = probed.arrive("a")

    def fetch() -> None:
        made.kv_cache_manager.group.allocate("a", made.kv_cache_manager.block_pool, 1)
        one.status.name = "WAITING_FOR_REMOTE_KVS"

    made.within = fetch
    probed.step({})
    made.within = lambda: None
    record = probed.drain().request("a")
    assert record is not None
    assert record.status == Status.WAITING_FOR_REMOTE_KVS
    made._update_from_kv_xfer_finished(SimpleNamespace(finished_recving=None, finished_sending=None))
    assert not probed.drain().request("a").ready_ns  # type: ignore[union-attr]
    made._update_from_kv_xfer_finished(SimpleNamespace(finished_recving={"a"}, finished_sending=None))
    assert probed.drain().request("a").ready_ns  # type: ignore[union-attr]


@pytest.mark.parametrize("status", [Status.WAITING_FOR_STREAMING_REQ, Status.WAITING])
def test_a_session_that_stopped_waits_for_its_next_input_or_is_queued_with_it(status: Status) -> None:
    made = scheduler(stops_as=status.name)
    probed = Probed(made)
    one = probed.arrive("a")
    probed.step({"a": 10}, "a")
    one.status.name = "RUNNING"
    made._handle_stopped_request(one)
    record = probed.drain().request("a")
    assert record is not None
    assert record.status == status
