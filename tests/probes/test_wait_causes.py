"""Why a pass left requests out, where vLLM's own scheduler seldom shows it: on a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope.monitor.contract.kinds import Cause
from tests.probes.stand_in import Probed, Queue, request, scheduler, with_vllm


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    with_vllm(monkeypatch)


def cause_of(probed: Probed, name: str) -> Cause:
    record = probed.drain().request(name)
    assert record is not None
    return Cause(record.cause)


def runs(probed: Probed, *names: str) -> list[Any]:
    """These requests decode."""
    requests = [probed.arrive(name) for name in names]
    for one in requests:
        one.num_output_tokens = 1
    probed.step(dict.fromkeys(names, 10), *names)
    return requests


def skips(probed: Probed, one: Any, tokens: dict[str, int]) -> None:
    """A pass takes the next request from the queue, puts it back, and goes on."""

    def put_back() -> None:
        probed.scheduler.waiting.append(probed.scheduler.waiting.pop_request())

    assert probed.scheduler.waiting[0] is one
    probed.scheduler.within = put_back
    probed.step(tokens)


def short_of_blocks(probed: Probed) -> None:
    """One request holds all blocks."""
    pool = probed.scheduler.kv_cache_manager.block_pool
    probed.scheduler.kv_cache_manager.group.allocate("runs", pool, pool.free_block_queue.num_free_blocks)


# ---------------------------------------------------------------- requests that wait


def test_a_request_below_max_num_seqs_that_lacks_blocks_waits_for_blocks() -> None:
    probed = Probed(scheduler(max_num_running_reqs=2))
    runs(probed, "runs")
    short_of_blocks(probed)
    probed.arrive("waits")
    probed.step({"runs": 1})
    assert cause_of(probed, "waits") == Cause.KV_BLOCKS
    probed.scheduler.max_num_running_reqs = 1
    full = Probed(scheduler(max_num_running_reqs=1))
    runs(full, "runs")
    full.arrive("waits")
    full.step({"runs": 1})
    assert cause_of(full, "waits") == Cause.MAX_NUM_SEQS


def test_a_request_that_is_not_tracked_hides_no_other() -> None:
    """It arrived while the hook for that was off."""
    probed = Probed(scheduler())
    runs(probed, "runs")
    short_of_blocks(probed)
    probed.scheduler.waiting.append(request("unknown"))
    probed.arrive("waits")
    probed.step({"runs": 1})
    assert cause_of(probed, "waits") == Cause.KV_BLOCKS


@pytest.mark.parametrize("external", [0, 160])
def test_a_chunk_of_no_tokens_is_the_cause_unless_a_connector_would_load_the_prompt(external: int) -> None:
    """Mamba layers have no place yet at which a chunk could end."""

    class Connector:
        def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
            return external, False

    made = scheduler(
        connector=Connector(), need_mamba_block_aligned_split=True, _mamba_block_aligned_split=lambda *_: 0
    )
    probed = Probed(made)
    runs(probed, "runs")
    short_of_blocks(probed)
    one = probed.arrive("waits", num_tokens=170, num_prompt_tokens=170)
    made.within = lambda: made.connector.get_num_new_matched_tokens(one, 0)
    probed.step({"runs": 1})
    assert cause_of(probed, "waits") == (Cause.KV_BLOCKS if external else Cause.ZERO_TOKENS)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"num_stale_output_tokens": 2, "drop_stale_output": False}, Cause.STEP_IN_FLIGHT),
        ({"num_stale_output_tokens": 2, "drop_stale_output": True}, Cause.UNKNOWN),
        ({"num_stale_output_tokens": 0, "drop_stale_output": False}, Cause.UNKNOWN),
        ({}, Cause.UNKNOWN),
    ],
)
def test_a_request_with_output_of_a_step_in_flight_waits_for_that(fields: dict[str, Any], cause: Cause) -> None:
    """Unless it drops that output. Earlier releases have no such requests."""
    probed = Probed(scheduler())
    runs(probed, "runs")
    skips(probed, probed.arrive("waits", **fields), {"runs": 1})
    assert cause_of(probed, "waits") == cause


@pytest.mark.parametrize(("adapter", "cause"), [(1, Cause.UNKNOWN), (2, Cause.LORA), (None, Cause.UNKNOWN)])
def test_a_request_lacks_an_adapter_slot_only_if_its_adapter_is_in_none(adapter: int | None, cause: Cause) -> None:
    probed = Probed(scheduler(lora_config=SimpleNamespace(max_loras=1)))
    (running,) = runs(probed, "runs")
    running.lora_request = SimpleNamespace(lora_int_id=1)
    lora = SimpleNamespace(lora_int_id=adapter) if adapter else None
    skips(probed, probed.arrive("waits", lora_request=lora), {"runs": 1})
    assert cause_of(probed, "waits") == cause


@pytest.mark.parametrize(("most", "cause"), [(1, Cause.MAX_NUM_SEQS), (2, Cause.BEHIND_HEAD)])
def test_a_compiled_grammar_stands_behind_the_head_unless_no_request_could_start(most: int, cause: Cause) -> None:
    probed = Probed(scheduler(max_num_running_reqs=most))
    runs(probed, "runs")
    structured = SimpleNamespace(_grammar=object())
    probed.arrive("waits", status="WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", structured_output_request=structured)
    probed.step({"runs": 1})
    assert cause_of(probed, "waits") == cause


@pytest.mark.parametrize(("reached", "cause"), [(False, Cause.BEHIND_HEAD), (True, Cause.REMOTE_KV)])
def test_a_request_that_a_pass_reaches_and_does_not_promote_stands_behind_no_head(reached: bool, cause: Cause) -> None:
    made = scheduler(finished_recving_kv_req_ids={"waits"})
    probed = Probed(made)
    runs(probed, "runs")
    one = probed.arrive("waits", status="WAITING_FOR_REMOTE_KVS")

    def look() -> None:
        if reached:
            made.waiting.pop_request()
            made.waiting.insert(0, one)

    made.within = look
    probed.step({"runs": 1})
    assert cause_of(probed, "waits") == cause


def test_a_pause_for_new_requests_holds_back_those_of_both_queues() -> None:
    """By priority, over all queues. Only the queue of requests that hold blocks is served."""
    made = scheduler(policy=SimpleNamespace(name="PRIORITY"), skipped_waiting=Queue())
    probed = Probed(made)
    runs(probed, "runs")
    made._pause_state = SimpleNamespace(name="PAUSED_NEW")
    made.skipped_waiting.append(probed.arrive("first", priority=0))
    made.waiting.clear()
    probed.arrive("second", priority=1)
    probed.step({"runs": 1})
    assert cause_of(probed, "first") == Cause.PAUSED


def test_a_request_that_is_passed_over_again_is_reported_as_the_count_doubles() -> None:
    probed = Probed(scheduler(max_num_running_reqs=1))
    runs(probed, "runs")
    probed.arrive("waits")

    def counts() -> Iterator[int]:
        for _ in range(5):
            probed.step({"runs": 1})
            record = probed.drain().request("waits")
            assert record is not None
            yield record.times_passed_over

    assert list(counts()) == [1, 2, 2, 4, 4]


@pytest.mark.parametrize(("before", "cause"), [(0, Cause.KV_BLOCKS), (1, Cause.UNKNOWN)])
def test_blocks_that_a_pass_frees_after_it_refused_a_request_were_not_free_for_it(before: int, cause: Cause) -> None:
    """It keeps the blocks of copies on write until it has considered all requests. The request needs one block."""
    probed = Probed(scheduler())
    runs(probed, "runs")
    pool = probed.scheduler.kv_cache_manager.block_pool
    retained = pool.get_new_blocks(1)
    probed.scheduler.kv_cache_manager.group.allocate("runs", pool, pool.free_block_queue.num_free_blocks - before)
    probed.arrive("waits")
    probed.scheduler.within = lambda: probed.scheduler._free_cow_retained_blocks(retained, 1)
    probed.step({"runs": 1})
    assert cause_of(probed, "waits") == cause


def test_what_a_pass_frees_after_its_refusals_is_free_in_the_next() -> None:
    probed = Probed(scheduler())
    runs(probed, "runs")
    pool = probed.scheduler.kv_cache_manager.block_pool
    retained = pool.get_new_blocks(1)
    short_of_blocks(probed)
    probed.arrive("waits")
    probed.scheduler.within = lambda: probed.scheduler._free_cow_retained_blocks(retained, 1)
    probed.step({"runs": 1})
    probed.scheduler.within = lambda: None
    probed.step({"runs": 1})
    assert cause_of(probed, "waits") == Cause.UNKNOWN, "with a block free, no refusal explains why it still waits"


# ---------------------------------------------------------------- requests that run


@pytest.mark.parametrize(("runs_between", "times"), [(True, 1), (False, 2)])
def test_a_request_that_ran_since_it_was_passed_over_is_reported_anew(runs_between: bool, times: int) -> None:
    """Else it is the third time, and a count is reported as it doubles."""
    probed = Probed(scheduler())
    runs(probed, "first", "last")
    for _ in range(2):
        probed.step({"last": 1})
    if runs_between:
        probed.step({"first": 1, "last": 1})
    probed.step({"last": 1})
    record = probed.drain().request("first")
    assert record is not None
    assert record.times_passed_over == times


@pytest.mark.parametrize(("served", "cause"), [("first", Cause.TOKEN_BUDGET), ("last", Cause.ZERO_TOKENS)])
def test_a_running_request_lacks_budget_only_behind_those_that_took_it(served: str, cause: Cause) -> None:
    """A pass gives tokens in the order in which requests began to run."""
    probed = Probed(scheduler())
    names = ["first", "last"]
    runs(probed, *names)
    for _ in range(2):
        probed.step({served: 512})
    (left_out,) = {*names} - {served}
    assert cause_of(probed, left_out) == cause


@pytest.mark.parametrize(("tokens", "cause"), [(0, Cause.ENCODER), (4, Cause.ZERO_TOKENS)])
def test_a_running_request_lacks_the_encoder_if_no_tokens_come_before_its_image(tokens: int, cause: Cause) -> None:
    probed = Probed(scheduler())
    first, _ = runs(probed, "first", "last")
    probed.scheduler.within = lambda: probed.scheduler._try_schedule_encoder_inputs(first, tokens)
    for _ in range(2):
        probed.step({"last": 1})
    assert cause_of(probed, "first") == cause
