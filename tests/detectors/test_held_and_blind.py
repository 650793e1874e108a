"""held.* and blind.*: information, so that nobody goes looking for a leak."""

from __future__ import annotations

from monitor.events.kinds import Kind, Stage
from monitor.events.wire import Run, batch_of
from tests.detectors.scenes import ENGINE, Spoken, Watched, value

PREFIX_CACHE = "held.prefix-cache"
LONG_REQUEST = "held.long-request"
STREAM_GAP = "blind.stream-gap"


def test_a_warm_prefix_cache_is_told() -> None:
    scene = Watched()
    prefix = list(range(100))
    for _ in range(4):
        scene.lab.arrive([*prefix, 1], max_tokens=4)
        scene.run_until_idle()
    scene.watch.settle()
    (finding,) = scene.firing()
    assert (finding.code, finding.severity, finding.verdict) == (PREFIX_CACHE, "info", "confirmed")
    assert value(finding, "cached_idle_blocks") == scene.lab.pool.num_cached_idle
    totals = scene.ledger.state.totals
    assert totals.hit_tokens > 0
    assert value(finding, "prefix_hit_rate") == round(totals.hit_tokens / totals.looked_up_tokens, 4)


def test_a_cold_cache_is_not_worth_a_line() -> None:
    scene = Watched()
    scene.lab.arrive(20, max_tokens=1)
    scene.run_until_idle()
    scene.live(5)
    assert 0 < scene.ledger.state.cached_idle < scene.lab.pool.usable / 10
    assert not scene.firing()


def test_a_long_request_that_needs_what_it_holds() -> None:
    scene = Watched(prefix_caching=False)
    request = scene.lab.arrive(100, max_tokens=150)
    scene.lab.arrive(8, max_tokens=150)
    scene.live(20, every=0.2)
    (finding,) = scene.firing()
    assert (finding.code, finding.severity, finding.verdict) == (LONG_REQUEST, "info", "confirmed")
    assert finding.culprits.requests == [request.id]
    assert value(finding, "blocks_held") == len(scene.lab.blocks_of(request.number))
    scene.run_until_idle(seconds=0.2)
    scene.live(5)
    assert not scene.firing()


def test_a_long_request_that_does_not_move_is_not_excused() -> None:
    scene = Watched(prefix_caching=False)
    scene.lab.arrive(100, max_tokens=150)
    scene.live(10, every=0.2)
    assert scene.firing(LONG_REQUEST)
    scene.launch()
    scene.beat(10)
    assert not scene.firing(LONG_REQUEST)


def test_lost_events_are_told_and_forgotten() -> None:
    scene = Spoken()
    scene.arrive(7, [3, 4])
    scene.say()
    lost = Run(Kind.LOST, 0, -1, [5, 7, Stage.TRANSPORT], [])
    scene.watch.feed([batch_of(ENGINE, scene.packer.epoch, [lost], wall_ns=scene.clock.time_ns())])
    scene.watch.settle()
    (finding,) = scene.firing()
    assert (finding.code, finding.severity, finding.verdict) == (STREAM_GAP, "info", "confirmed")
    assert value(finding, "batches_lost") == 3
    assert value(finding, "lost_at_stage") == "transport"
    assert "may be wrong" in finding.explanation
    scene.watch.feed([scene.packer.keyframe()])
    scene.wait(1)
    (finding,) = scene.firing()
    assert "exact again" in finding.explanation
    scene.wait(scene.watch.settings(STREAM_GAP, "remember_s") + 5)
    scene.wait(5)
    assert not scene.firing()


def test_what_cannot_be_read_is_a_gap_and_no_corruption() -> None:
    """A contract broken by the sender says nothing about the engine's own memory."""
    scene = Spoken()
    scene.arrive(7, [3, 4])
    scene.say()
    torn = Run(Kind.RELEASED, 0, 7, [], [3, 4])  # no reason
    sequence, now_ns = scene.ledger.sequence + 1, scene.clock.time_ns()
    scene.watch.feed([batch_of(ENGINE, scene.packer.epoch, [torn], sequence=sequence, wall_ns=now_ns)])
    scene.watch.settle()
    assert [f.code for f in scene.firing()] == [STREAM_GAP]
    (finding,) = scene.firing()
    assert "IndexError" in str(value(finding, "unreadable"))
