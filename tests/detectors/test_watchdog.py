"""What the engine's own watchdog says, held against the books: taken if they agree, forgotten when things move."""

from __future__ import annotations

from kvscope.engine.core.watchdog import Watchdog
from kvscope.monitor.contract.kinds import Cause, Status
from kvscope.monitor.outputs.prometheus import WatchCollector
from tests.detectors.scenes import Watched, never_fits, value


def watchdog_of(scene: Watched) -> Watchdog:
    lab = scene.lab
    return Watchdog(lab.scheduler, lab.log, lambda: lab.launched, stall_s=5.0, clock=lab.clock)


def stalled(scene: Watched) -> list[str]:
    return [r.id for r in scene.ledger.state.requests.values() if r.stalled_ns]


def gauge(scene: Watched) -> float:
    (family,) = [f for f in WatchCollector(scene.watch).collect() if f.name == "kvscope_requests_stalled"]
    (sample,) = family.samples
    return sample.value


def test_it_says_so_too() -> None:
    scene, big = never_fits()
    watchdog = watchdog_of(scene)
    watchdog.look()
    scene.live(2.0)
    assert value(scene.only("stuck.never-fits"), "engine_watchdog") == "has not spoken"
    for _ in range(4):
        scene.live(3.0)
        watchdog.look()
    scene.live(1.0)
    assert big.id in stalled(scene)
    assert gauge(scene) == len(stalled(scene))
    record = scene.ledger.request(big.id)
    assert record is not None
    assert (record.stalled_cause, record.status) == (Cause.KV_BLOCKS, Status.WAITING)
    assert "reports it too" in str(value(scene.only("stuck.never-fits"), "engine_watchdog"))
    view = next(r for r in scene.watch.requests(scene.ledger.engine) if r.id == big.id)
    assert view.stalled
    # Aborted, it takes nobody else with it: the others move, and are stalled no more.
    scene.lab.abort(big)
    scene.steps(3)
    assert stalled(scene) == []
    assert gauge(scene) == 0


def test_a_word_that_the_books_contradict_is_not_taken() -> None:
    """It looks from another thread: what it says may be about a state that is over."""
    scene = Watched()
    request = scene.lab.arrive(8, max_tokens=50)
    scene.steps(3)
    scene.lab.log.stalled(request.number, Status.WAITING, 0, Cause.KV_BLOCKS)
    scene.steps(1)
    assert stalled(scene) == []
    scene.lab.log.stalled(request.number, Status.RUNNING, 2, Cause.STEP_IN_FLIGHT)
    scene.lab.take()
    scene.look()
    assert stalled(scene) == [request.id]
    scene.steps(1)  # it runs on
    assert stalled(scene) == []
