"""Events as they are listed and explained: which, in what order, in what words."""

from __future__ import annotations

import pytest

from kvscope.monitor.base.errors import BadQuestion, NotKnown
from kvscope.monitor.base.text import in_words, timestamp
from kvscope.monitor.contract.kinds import Cause, Kind, Limit
from kvscope.monitor.contract.wire import Batch
from kvscope.monitor.ledger.engine_ledger import Position
from kvscope.monitor.questions.event_list import MAX_EVENT_IDS
from tests.detectors.scenes import ENGINE, Watched, finished_held, never_fits
from tests.questions.test_retained_blocks import busy

EVERY_KIND = [kind.name.lower() for kind in Kind]


def stated(scene: Watched) -> list[str]:
    """The positions of all events that were ever sent, in order."""
    frames = [frame for frame in scene.lab.frames if isinstance(frame, Batch)]
    return [str(Position(f.epoch, f.sequence, n)) for f in frames for n, _ in enumerate(f.events())]


def test_each_event_once_in_order_and_in_words() -> None:
    scene = busy(4, connector_share=0.5)
    scene.lab.heartbeat()
    scene.look()
    listed = scene.watch.events(ENGINE, limit=100_000, kinds=EVERY_KIND)
    assert [event.position for event in listed] == stated(scene)
    assert all(event.text and event.at for event in listed)
    names = {request.id for request in scene.watch.requests(ENGINE)}
    assert {event.request for event in listed} - {""} <= names | {f"r-{n}" for n in range(200)}
    usual = scene.watch.events(ENGINE, limit=100_000)
    assert {event.kind for event in usual} < {event.kind for event in listed}
    assert not {"clock", "progressed", "heartbeat", "audit_blocks"} & {event.kind for event in usual}
    for event in listed:
        assert event.block_count == len(event.blocks) <= MAX_EVENT_IDS
        assert bool(event.blocks) == (
            event.kind
            in {
                "allocated",
                "reused",
                "cached",
                "evicted",
                "detached",
                "released",
                "free_deferred",
                "reclaimed",
            }
        )


def test_pages_of_events_join() -> None:
    """The position of the first of one page is the end of the page before."""
    scene = busy(5)
    whole = scene.watch.events(ENGINE, limit=100_000)
    read = scene.watch.events(ENGINE, limit=70)
    while len(page := scene.watch.events(ENGINE, until=read[0].position, limit=70)) == 70:
        read = page + read
    assert page + read == whole


def test_those_around_a_position() -> None:
    scene = busy(6)
    whole = scene.watch.events(ENGINE, limit=100_000)
    for place in (0, 3, len(whole) // 2, len(whole) - 1):
        shown = scene.watch.events(ENGINE, around=whole[place].position, limit=20)
        assert shown == whole[max(0, place - 9) : place + 11]


def test_a_window_of_events() -> None:
    scene = busy(7)
    whole = scene.watch.events(ENGINE, limit=100_000)
    first, last = whole[len(whole) // 4], whole[len(whole) // 2]
    shown = scene.watch.events(ENGINE, first.at or "", last.at or "", limit=100_000)
    assert shown == [event for event in whole if (first.at or "") <= (event.at or "") < (last.at or "")]
    exactly = scene.watch.events(ENGINE, first.position, last.position, limit=100_000)
    assert exactly == whole[len(whole) // 4 : len(whole) // 2]


def test_those_about_a_request_or_a_block() -> None:
    scene = busy(8)
    whole = scene.watch.events(ENGINE, limit=100_000)
    request = next(view for view in scene.watch.requests(ENGINE) if view.blocks or view.ended)
    about = scene.watch.events(ENGINE, request=request.id, limit=100_000)
    steps = [event for event in about if event.kind == "step_launched"]
    assert [event for event in about if event not in steps] == [e for e in whole if e.request == request.id]
    assert steps
    block = whole[[event.kind for event in whole].index("allocated")].blocks[0]
    assert scene.watch.events(ENGINE, block=block, limit=100_000) == [e for e in whole if block in e.blocks]
    freed = scene.watch.events(ENGINE, block=block, kinds=["released"], limit=100_000)
    assert {event.kind for event in freed} == {"released"}
    assert freed == [event for event in whole if block in event.blocks and event.kind == "released"]


def test_what_is_no_kind_and_no_request() -> None:
    scene = busy(1)
    with pytest.raises(BadQuestion, match=r"'alocated' is not a kind of event; there are: started, .*allocated"):
        scene.watch.events(ENGINE, kinds=["alocated"])
    with pytest.raises(NotKnown, match="no request 'nobody'"):
        scene.watch.events(ENGINE, request="nobody")


# -------------------------------------------------------------------- in sentences, and over time


def test_a_window_is_explained() -> None:
    scene = finished_held("leak.finished-held:every=2")
    scene.live(15)
    view = scene.watch.explain(ENGINE)
    (leak,) = (finding for finding in view.findings if finding.code == "leak.finished-held")
    assert view.findings[0] == leak
    assert view.sentences[-1].startswith(f"leak.finished-held: {leak.explanation}")
    assert (
        scene.watch.explain(ENGINE, "2001-01-01T00:00:00Z", timestamp(scene.lab.packer.epoch + 10**7) or "").findings
        == []
    )


def test_a_long_window_is_explained_by_where_usage_fell_furthest() -> None:
    scene = Watched(total=200, block_size=4)
    for _ in range(6):
        scene.lab.arrive(60, max_tokens=20)
    scene.run_until_idle(0.2)
    fell = timestamp(scene.now_ns) or ""
    scene.live(200)
    text = next(one for one in scene.watch.explain(ENGINE).sentences if "Usage fell" in one)
    reported = scene.watch.usage_drop(ENGINE, fell, 60.0)
    assert reported.highest
    assert reported.highest.at
    assert f"at {reported.highest.at[11:23]} to" in text
    assert all(f"{blocks:,} {in_words(reason)}" in text for reason, blocks in reported.freed_in_drop.items())


def test_usage_that_did_not_fall_is_left_out() -> None:
    scene = Watched(total=200, block_size=4)
    for _ in range(10):
        scene.lab.arrive(8, max_tokens=100)
        scene.steps(1, 0.2)
    (queue,) = scene.watch.explain(ENGINE).sentences
    assert "waited" in queue


def test_so_much_that_it_cannot_be_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = busy(1)
    monkeypatch.setattr("kvscope.monitor.questions.past.MAX_WINDOW_BYTES", 20_000)
    with pytest.raises(BadQuestion, match="too many events: ask until"):
        scene.watch.retained_blocks(ENGINE)


def test_the_queue_is_explained_by_what_its_head_waits_for() -> None:
    scene, request = never_fits()
    for _ in range(3):
        scene.lab.arrive(8)
    scene.live(10)
    (point,) = scene.watch.points(ENGINE, limit=1)
    assert point.waiting_by_reason[Cause.KV_BLOCKS.name] == 1
    assert point.waiting_by_reason[Cause.BEHIND_HEAD.name] == point.requests_waiting - 1
    (sentence,) = (text for text in scene.watch.explain(ENGINE).sentences if "waited" in text)
    assert f"{point.requests_waiting} requests waited" in sentence
    assert f"(1 for KV blocks, {point.requests_waiting - 1} behind the first)" in sentence
    assert request


def test_points_say_what_bounded_the_steps() -> None:
    scene = busy(2, max_num_batched_tokens=16)
    (last,) = scene.watch.points(ENGINE, limit=1)
    totals = scene.ledger.state.totals
    assert sum(last.limits.values()) == last.steps == totals.steps
    assert last.limits == {Limit(limit).name: steps for limit, steps in totals.limits.items()}
    assert last.allocation_failures == totals.allocation_failures
    assert sum(last.waiting_by_reason.values()) == last.requests_waiting


def test_points_of_a_window() -> None:
    scene = busy(3)
    every = scene.watch.points(ENGINE, limit=10_000)
    first, last = every[len(every) // 3], every[len(every) // 2]
    assert scene.watch.points(ENGINE, limit=10_000, since=first.at, until=last.at) == [
        point for point in every if first.at_ns <= point.at_ns <= last.at_ns
    ]
    until_then = scene.watch.points(ENGINE, seconds=2, limit=10_000, until=last.at)
    assert until_then == [point for point in every if last.at_ns - 2e9 <= point.at_ns <= last.at_ns]


# -------------------------------------------------------------------- findings


def test_findings_of_a_window_are_those_whose_life_touches_it() -> None:
    scene = finished_held("leak.finished-held:limit=1:every=2")
    scene.live(15)
    (leak,) = (finding for finding in scene.watch.findings("firing") if finding.code == "leak.finished-held")
    assert leak.since
    assert leak in scene.watch.findings(since=leak.since)
    assert leak in scene.watch.findings(engine=ENGINE, until=leak.since)
    assert leak not in scene.watch.findings(engine="another")
    assert leak not in scene.watch.findings(until=timestamp(scene.lab.packer.epoch - 10**9) or "")
    detail = scene.watch.finding(leak.id)
    assert detail.finding == leak
    assert detail.points[0].at < leak.since < detail.points[-1].at
    with pytest.raises(NotKnown, match="no finding 'x'"):
        scene.watch.finding("x")


def test_what_fired_then_is_counted_then() -> None:
    scene = finished_held("leak.finished-held:every=2")
    scene.live(3)
    before = timestamp(scene.now_ns) or ""
    assert "error" not in scene.watch.engines()[0].findings
    scene.live(15)
    assert "error" in scene.watch.engines()[0].findings
    assert "error" not in scene.watch.engines(before)[0].findings
