"""A memory budget of the service: what is given up for it, and when nothing is."""

from __future__ import annotations

import itertools

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.ledger.engine_ledger import MAX_POINTS, MAX_RECENT_BYTES, POINT_EVERY_NS, EngineLedger
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service.memory_budget import POINT_BYTES, ServiceMemory

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
    first, second, third = budget.view().given_up
    assert first.endswith("MiB of recent events for each engine in memory instead of 128 MiB")
    assert second == "a point of the timeline every 1.0 s instead of 0.1 s"
    assert third.endswith(" minutes of the timeline in memory instead of 60")


class Process:
    """A service of two engines whose resident memory and clock a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, resident_mib: int = 100, budget_mib: int = 512) -> None:
        self.pipeline = fed(2, steps=60)
        self.resident_mib = resident_mib
        self.now_s = 1000.0
        self.released = 0
        monkeypatch.setattr("kvscope.monitor.service.memory_budget.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("kvscope.monitor.service.memory_budget.release_memory", self._release)
        self.budget = ServiceMemory(self.pipeline, budget_mib * MIB, lambda: self.resident_mib * MIB)
        self.budget.check()
        self.planned = self.budget.view()

    def _release(self) -> None:
        """Take the place of a collection that goes through all objects of the tests' process."""
        self.released += 1

    def run(self, seconds: int) -> list[float]:
        """Check for so long; the share of the plan that was kept, each second."""
        kept = []
        for _ in range(seconds):
            self.now_s += 1
            self.budget.check()
            kept.append(self.budget.view().kept_share)
        return kept


def test_a_process_beyond_its_budget_keeps_less_down_to_a_fifth_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.resident_mib = 600
    process.run(800)
    view = process.budget.view()
    assert view.kept_share == 0.2
    assert view.recent_bytes == pytest.approx(process.planned.recent_bytes / 5)
    assert view.exceeded
    assert process.released > view.reductions
    for ledger in process.pipeline.fleet.engines.values():
        times = [point.at_ns for point in ledger.points]
        assert all(later - earlier >= ledger.point_every_ns for earlier, later in itertools.pairwise(times))
        assert ledger.points.maxlen == view.max_points


def test_one_engine_whose_share_is_more_than_it_needs_gives_up_most_of_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process(monkeypatch, budget_mib=4096)
    assert process.planned.recent_bytes == MAX_RECENT_BYTES
    process.resident_mib = 4000
    process.run(300)
    assert process.budget.view().recent_bytes == round(0.2 * MAX_RECENT_BYTES)


def test_what_was_given_up_is_kept_again_once_there_is_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(monkeypatch)
    process.resident_mib = 500
    process.run(300)
    process.resident_mib = 110
    assert process.run(59) == [0.2] * 59  # not yet
    process.run(600)
    view = process.budget.view()
    assert (view.kept_share, view.recent_bytes) == (1.0, process.planned.recent_bytes)
    assert bounds(next(iter(process.pipeline.fleet.engines.values())))[0] == process.planned.recent_bytes
    assert (view.reductions, view.restorations) == (1, 8)
    shares = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert [share for share in shares if share.endswith("plan")] == [
        f"memory budget of 512 MiB, {kept} % of the plan" for kept in (100, 20, 25, 31, 39, 49, 61, 76, 95, 100)
    ]


@pytest.mark.parametrize(
    ("beyond_mib", "given_up_mib"),
    [
        pytest.param(100, 100, id="as much as the process takes too much"),
        pytest.param(5, 55, id="a fifth at least"),
        pytest.param(500, 221, id="four fifths at most"),
    ],
)
def test_one_reduction_gives_up_as_much_as_the_process_takes_too_much(
    monkeypatch: pytest.MonkeyPatch, beyond_mib: int, given_up_mib: int
) -> None:
    process = Process(monkeypatch)
    planned = process.planned
    for ledger in process.pipeline.fleet.engines.values():  # full rings and timelines, of 276 MiB together
        ledger.recent_bytes = planned.recent_bytes
        ledger.points.extend(itertools.repeat(ledger.points[0], planned.max_points))
    process.resident_mib = round(0.9 * 512) + beyond_mib
    process.run(1)
    view = process.budget.view()
    assert view.reductions == 1
    of_all = 2 * (planned.recent_bytes + POINT_BYTES * planned.max_points) / MIB
    assert (1 - view.kept_share) * of_all == pytest.approx(given_up_mib, abs=2)


def test_nothing_is_kept_again_where_full_rings_would_exceed_the_budget_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is below the bound while the rings that it may fill are still empty."""
    process = Process(monkeypatch)
    process.resident_mib = 500
    process.run(300)
    process.resident_mib = 400  # 85 % of the budget is 435 MiB, and the two rings have room for more than 100 MiB
    assert set(process.run(600)) == {0.2}


def test_a_peak_that_returns_restarts_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.resident_mib = 500
    process.run(300)
    for _ in range(10):
        process.resident_mib = 110
        process.run(55)
        process.resident_mib = 500
        process.run(3)
    assert process.budget.view().restorations == 0


def test_a_service_that_gives_up_something_releases_memory() -> None:
    budget = ServiceMemory(fed(2), 512 * MIB, iter([100 * MIB] + [500 * MIB] * 10).__next__)
    budget.check()
    assert budget.view().reductions == 1


def test_a_budget_below_what_the_service_itself_takes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"too small: the service takes 200 MiB without engines\. Give 330M"):
        ServiceMemory(Pipeline(), 256 * MIB, lambda: 200 * MIB)
