"""leak.rising-floor, by the stream and by figures, and what rises without being one."""

from __future__ import annotations

import msgspec
import pytest

from kvscope.monitor.ledger.pool_forecast import IdleFloors
from tests.detectors.leaks import rising_floor
from tests.detectors.scenes import Observer, Watched, value
from tests.detectors.test_logs import judged, line

RISING_FLOOR = "leak.rising-floor"
UNACCOUNTED = "leak.unaccounted"


def test_requests_that_leave_a_block_each() -> None:
    scene = rising_floor()
    scene.live(3)
    finding = scene.only(RISING_FLOOR)
    assert (finding.severity, finding.verdict) == ("warning", "confirmed")
    assert sorted(finding.culprits.requests) == sorted(scene.lab.faults.on[RISING_FLOOR].affected)
    assert finding.culprits.blocks == [b for b, refs in enumerate(scene.lab.pool.refs) if refs and b]
    assert value(finding, "last_floor") == len(finding.culprits.blocks) == scene.ledger.state.used
    assert value(finding, "floor_rises") == 5
    assert value(finding, "floor_rise_mean") == 2
    assert all((finding.do_now, finding.change, finding.wont_help, finding.since))


def test_before_the_floor_has_risen_some_times_it_is_unaccounted() -> None:
    """The blocks are lost all the same; and they are never two leaks at once."""
    scene = rising_floor(drains=2)
    scene.live(5)
    early = scene.only(UNACCOUNTED)
    for _ in range(2):
        scene.lab.arrive(20, max_tokens=4)
        scene.run_until_idle()
        scene.live(1)
    scene.live(5)
    late = scene.only(RISING_FLOOR)
    assert set(early.culprits.blocks) < set(late.culprits.blocks)
    assert [f.id for f in scene.watch.findings("resolved")] == [early.id]


def test_frees_that_were_skipped_make_floors_too_and_are_told_apart() -> None:
    """Whole requests after an abort, a block after an end: each in its own finding."""
    scene = Watched(total=129, faults=[RISING_FLOOR, UNACCOUNTED])
    for _ in range(5):
        scene.lab.arrive(20, max_tokens=4)
        gone = scene.lab.arrive(12, max_tokens=40)
        scene.steps(3)
        scene.lab.abort(gone)
        scene.run_until_idle()
        scene.live(1)
    scene.live(5)
    by_code = {f.code: f.culprits for f in scene.firing() if f.severity != "info"}
    assert by_code.keys() == {RISING_FLOOR, UNACCOUNTED}
    for code, culprits in by_code.items():
        assert sorted(culprits.requests) == sorted(scene.lab.faults.on[code].affected)
    assert set(by_code[RISING_FLOOR].blocks).isdisjoint(by_code[UNACCOUNTED].blocks)
    assert len(by_code[RISING_FLOOR].blocks) + len(by_code[UNACCOUNTED].blocks) == scene.ledger.state.used


@pytest.mark.parametrize("connector_share", [0.0, 1.0])
def test_drains_of_a_healthy_engine_have_no_floor(connector_share: float) -> None:
    """A warm cache is not in use; and what a connector keeps for a while comes back before the next drain, or later."""
    scene = Watched(total=129, connector_share=connector_share)
    for n in range(8):
        for _ in range(1 + n):
            scene.lab.arrive(20, max_tokens=4)
        scene.run_until_idle()
        scene.live(1)
    assert scene.ledger.state.cached_idle
    assert [floor.in_use for floor in scene.ledger.floors.rising()] == [0]
    assert not scene.alarms()


def test_floors_count_from_the_last_fall() -> None:
    floors = IdleFloors()
    for at, in_use in enumerate([5, 7, 2, 3, 3, 4]):
        floors.look(at, idle=False, worked=True, in_use=50)
        floors.look(at, idle=True, worked=True, in_use=in_use + 1)
        floors.look(at, idle=True, worked=False, in_use=in_use)
    assert [floor.in_use for floor in floors.rising()] == [2, 3, 4]


# -------------------------------------------------------------------- from figures alone


def drains(floors: list[float], peak: float = 0.6, idle_lines: int = 9) -> Observer:
    """Usage of an engine that is busy, then idle at each of these floors in turn for so many lines, 10 s apart."""
    busy = [line(4, peak, prompt=500.0), line(3, peak / 2, prompt=0.0)]
    return judged(
        [
            sample
            for floor in floors
            for sample in (*busy, line(0, floor, prompt=0.0), *[line(0, floor, 0.0)] * idle_lines)
        ]
    )


def test_a_floor_that_rises_by_figures() -> None:
    finding = drains([0.01, 0.03, 0.05, 0.07, 0.09]).only(RISING_FLOOR)
    assert (finding.verdict, value(finding, "floor_rises")) == ("likely", 4)
    assert (value(finding, "first_floor"), value(finding, "last_floor")) == (1.0, 9.0)
    assert "event stream" in finding.missing


def test_floors_that_rise_for_a_shorter_time_than_a_lease_may_be_a_connectors() -> None:
    assert not drains([0.01, 0.03, 0.05, 0.07, 0.09], idle_lines=2).firing(RISING_FLOOR)


@pytest.mark.parametrize(("idle_again", "found"), [(False, []), (True, [RISING_FLOOR])])
def test_floors_of_an_engine_that_is_busy_ever_after_show_no_hold(idle_again: bool, found: list[str]) -> None:
    """They rose within two minutes. What is in use since then belongs to the requests that run."""
    rising = [
        sample
        for floor in (0.01, 0.03, 0.05, 0.07, 0.09)
        for sample in (line(2, 0.3, prompt=500.0), line(0, floor, prompt=0.0), line(0, floor, 0.0))
    ]
    later = [line(4, 0.9, prompt=500.0)] * 60 + [line(0, 0.11, 0.0)] * (3 if idle_again else 0)
    assert [finding.code for finding in judged([*rising, *later]).firing(RISING_FLOOR)] == found


@pytest.mark.parametrize(("tokens_per_s", "found"), [(1.0, []), (0.0, [RISING_FLOOR])])
def test_a_look_at_which_nothing_runs_is_not_idle_where_tokens_came(tokens_per_s: float, found: list[str]) -> None:
    """Requests ran between two looks: what is in use is theirs, and shows no hold for as long as a lease."""
    rising = [
        sample
        for floor in (0.01, 0.03, 0.05, 0.07, 0.09)
        for sample in (line(2, 0.3, prompt=500.0), line(0, floor, prompt=0.0), line(0, floor, 0.0))
    ]
    last = msgspec.structs.replace(line(0, 0.09, 0.0), generation_tokens_per_s=tokens_per_s)
    later = [*[line(4, 0.9, prompt=500.0)] * 60, last]
    assert [finding.code for finding in judged([*rising, *later]).firing(RISING_FLOOR)] == found


def test_an_engine_that_waits_for_kv_from_elsewhere_is_not_idle() -> None:
    """What it holds for these requests is no floor."""
    floors = (0.01, 0.03, 0.05, 0.07, 0.09)
    waits = [msgspec.structs.replace(line(0, floor, 0.0), deferred=3) for floor in floors for _ in range(12)]
    looks = [one for n, wait in enumerate(waits) for one in ([line(2, 0.3, 500.0), wait] if n % 12 == 0 else [wait])]
    assert judged(looks).firing(RISING_FLOOR) == []


def test_a_floor_that_falls_again_is_no_rising_one() -> None:
    """What a slow consumer has not fetched yet, now more, now less."""
    assert "leak.rising-floor" not in {f.code for f in drains([0.05, 0.03, 0.06, 0.01, 0.04]).firing()}


def test_floors_of_nothing_are_none() -> None:
    assert not drains([0.0, 0.0, 0.0, 0.0, 0.0]).alarms()
