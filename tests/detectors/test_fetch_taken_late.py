"""A fetch that ended while the engine slept, and one that an engine which was awake has passed over."""

from __future__ import annotations

from tests.detectors import stuck
from tests.detectors.test_stuck_requests import fetch_reported


def test_an_engine_that_something_else_wakes_gets_its_time_to_take_the_fetch_in() -> None:
    """For 40 s nothing woke it. Awake, it has passed over no fetch yet; if it does for as long, the fetch is stuck."""
    scene, request = stuck.lost_wakeup()
    scene.beat(40)
    assert scene.lab.connector is not None
    scene.lab.connector.load_share = 0
    scene.lab.arrive(8, max_tokens=1_000)
    scene.live(20)
    assert not scene.firing("stuck.remote-load")
    scene.live(15)
    assert scene.only("stuck.remote-load").culprits.requests == [request.id]


def test_an_engine_that_sleeps_again_has_passed_over_the_fetch_before() -> None:
    """It was awake when the fetch ended, went on without it, and slept after that: the fetch is what is stuck."""
    scene, fetched, running = fetch_reported(seats=8)
    scene.live(10)
    scene.lab.abort(running)
    scene.steps(1)
    scene.beat(25)
    scene.lab.arrive(8, max_tokens=1_000)
    scene.live(2)
    assert scene.only("stuck.remote-load").culprits.requests == [fetched.id]
