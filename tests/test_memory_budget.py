"""A memory budget of the service: what is given up for it, and when nothing is."""

from __future__ import annotations

import itertools

import pytest

from kvscope.monitor.ledger.engine_ledger import MAX_POINTS, MAX_RECENT_BYTES, POINT_EVERY_NS, EngineLedger
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.service.memory_budget import MIN_RING_BYTES, ServiceMemory
from tests.lab import Lab

MIB = 1 << 20


def fed(engines: int, steps: int = 1) -> Pipeline:
    pipeline = Pipeline()
    for number in range(engines):
        lab = Lab(engine=f"lab-{number}@127.0.0.1:0/0", seed=number)
        for _ in range(steps):
            lab.arrive(20)
            lab.step(0.1)
        pipeline.feed(lab.frames)
    return pipeline


def bounds(ledger: EngineLedger) -> tuple[int, int, int | None]:
    return ledger.max_recent_bytes, ledger.point_every_ns, ledger.points.maxlen


def test_an_engine_with_room_keeps_the_default_and_nothing_is_given_up() -> None:
    pipeline = fed(1)
    budget = ServiceMemory(pipeline, 4096 * MIB, lambda: 100 * MIB)
    budget.check()
    (ledger,) = pipeline.fleet.engines.values()
    assert bounds(ledger) == (MAX_RECENT_BYTES, POINT_EVERY_NS, MAX_POINTS)
    assert budget.view().given_up == []


def test_25_engines_share_a_budget_and_it_is_reported_what_that_costs() -> None:
    pipeline = fed(25)
    budget = ServiceMemory(pipeline, 768 * MIB, lambda: 100 * MIB)
    budget.check()
    rings = {ledger.max_recent_bytes for ledger in pipeline.fleet.engines.values()}
    assert len(rings) == 1
    assert 25 * rings.pop() < 768 * MIB
    first, second = budget.view().given_up
    assert first.endswith("MiB of recent events for each engine in memory instead of 128 MiB")
    assert second.startswith("a point of the timeline every 0.")


def test_a_process_beyond_its_budget_keeps_less_down_to_a_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = fed(2, steps=60)
    resident = [100 * MIB]
    budget = ServiceMemory(pipeline, 1024 * MIB, lambda: resident[0])
    now_s = [1000.0]
    monkeypatch.setattr("kvscope.monitor.service.memory_budget.time.monotonic", lambda: now_s[0])
    budget.check()
    before = budget.view().recent_bytes
    resident[0] = 1000 * MIB
    for _ in range(80):
        now_s[0] += 10
        budget.check()
    assert before > budget.view().recent_bytes == MIN_RING_BYTES
    for ledger in pipeline.fleet.engines.values():
        times = [point.at_ns for point in ledger.points]
        assert all(later - earlier >= ledger.point_every_ns for earlier, later in itertools.pairwise(times))
        assert ledger.points.maxlen == budget.view().max_points


def test_a_budget_below_what_the_service_itself_takes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"too small: the service takes 200 MiB without engines\. Give 330M"):
        ServiceMemory(Pipeline(), 256 * MIB, lambda: 200 * MIB)
