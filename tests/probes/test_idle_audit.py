"""Audits of an engine that makes no passes, and the share of long steps that audits get."""

from __future__ import annotations

from typing import Any

import pytest

from kvscope.monitor.probes.vllm.scheduler_hooks import STEP_NS_A_SLICE
from kvscope.monitor.probes.vllm.table_reader import NS_A_BLOCK
from tests.probes.stand_in import Probed, scheduler, with_vllm

BLOCKS = 2_000
"""More than the few passes of a test audit."""


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Probed:
    """An engine that has served one request and falls idle."""
    with_vllm(monkeypatch)
    probed = Probed(scheduler(BLOCKS))
    serve(probed, "a")
    return probed


def serve(probed: Probed, name: str) -> None:
    probed.arrive(name)
    probed.scheduler.kv_cache_manager.group.allocate(name, probed.scheduler.kv_cache_manager.block_pool, 2)
    probed.step({name: 10}, name)
    probed.scheduler.running.clear()
    probed.scheduler.finish_requests(name)
    probed.drain()


def beats(probed: Probed, count: int = 1) -> int:
    """Heartbeats, a second apart. Returns the audits that are complete."""
    for _ in range(count):
        probed.clock.sleep(1)
        probed.packer.heartbeat()
        probed.received()
    return probed.ledger.state.audit_cycles


def test_an_idle_engine_is_audited_once_at_its_second_heartbeat(probed: Probed) -> None:
    assert beats(probed) == 0
    assert beats(probed) == 1
    assert not probed.ledger.anomalies
    assert beats(probed, 20) == 1


def test_what_was_read_is_dropped_if_a_request_came_before_the_next_heartbeat(probed: Probed) -> None:
    assert beats(probed) == 0
    serve(probed, "b")
    assert beats(probed) == 0
    assert not probed.ledger.anomalies


def test_an_engine_with_a_request_is_not_idle(probed: Probed) -> None:
    probed.arrive("b")
    assert beats(probed, 5) == 0


def test_an_audit_shows_a_difference_from_the_events(probed: Probed) -> None:
    """A block is taken in a way that the probe does not see."""
    pool = probed.scheduler.kv_cache_manager.block_pool
    pool.blocks[5].ref_cnt, pool.free_block_queue.num_free_blocks = 1, BLOCKS - 2
    assert beats(probed, 2) == 1
    assert probed.ledger.state.refs[5] == 1
    assert probed.ledger.unexplained_references() == {5: 1}


def test_an_engine_that_falls_idle_again_and_again_is_read_a_thousandth_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_vllm(monkeypatch)
    blocks = 20_000
    probed = Probed(scheduler(blocks))
    for number in range(60):
        serve(probed, f"r-{number}")
        beats(probed, 2)
    lived_s = probed.clock.ns / 1e9
    most = lived_s / (blocks * NS_A_BLOCK / 1e9)
    assert most / 3 < probed.ledger.state.audit_cycles <= most + 1


def test_a_table_that_changes_while_it_is_read_costs_no_heartbeat(probed: Probed) -> None:
    class Changing(dict[str, Any]):
        def __iter__(self) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

    probed.scheduler.requests = Changing(probed.scheduler.requests)
    assert beats(probed, 3) == 0


@pytest.mark.parametrize(("step_s", "cycles"), [(0.01, 0), (2.0, 1)])
def test_long_steps_are_followed_by_more_slices(monkeypatch: pytest.MonkeyPatch, step_s: float, cycles: int) -> None:
    """A pool of 400 blocks is read in some fifty slices: six steps of two seconds allow that, six short ones do not."""
    with_vllm(monkeypatch)
    probed = Probed(scheduler(400))
    probed.arrive("a", max_tokens=50)
    probed.step({"a": 10}, "a", seconds=step_s)
    for _ in range(5):
        probed.step({"a": 1}, seconds=step_s)
    assert (probed.drain().state.audit_cycles > 0) == cycles
    assert 50 * STEP_NS_A_SLICE / 1e9 < 5 * 2.0
