"""The life of a block and of a request, told from the events."""

from __future__ import annotations

from kvscope.monitor.contract.kinds import Cause, Kind, Load, Preempt, Status
from kvscope.monitor.contract.wire import Batch, Run, batch_of
from kvscope.monitor.ledger.event_history import HistoryLine, block_history, request_history, request_names, scan_events
from tests.detectors.scenes import ENGINE, Spoken, Watched, finished_held, unaccounted


def of_request(scene: Watched | Spoken, number: int) -> list[HistoryLine]:
    return request_history(scan_events(scene.ledger.recent, number), number, request_names(scene.ledger))


def of_block(scene: Watched | Spoken, block: int) -> list[HistoryLine]:
    return block_history(scene.ledger.recent, block, request_names(scene.ledger))


def texts(lines: list[HistoryLine]) -> list[str]:
    return [line.text for line in lines]


def test_a_request_from_its_arrival_to_its_end() -> None:
    scene = Watched(max_num_batched_tokens=16)
    request = scene.lab.arrive(40, max_tokens=6)
    scene.run_until_idle()
    assert texts(of_request(scene, request.number)) == [
        "arrived at the scheduler: 40 prompt tokens, at most 6 to generate; needs 10 blocks to start, 12 to finish",
        "queued (NEW)",
        "allocated 4 blocks",
        "prefix cache: 0 of 40 tokens found",
        "admitted: RUNNING, 0 tokens need not be computed",
        "computed up to token 16 in 1 step",
        "allocated 4 blocks",
        "computed up to token 32 in 1 step",
        "allocated 2 blocks",
        "first token",
        "computed up to token 40 in 1 step",
        "allocated 1 block",
        "generated up to token 5 in 4 steps",
        "allocated 1 block",
        "generated up to token 6 in 1 step",
        "finished: FINISHED_LENGTH_CAPPED",
        "released 12 blocks (FINISHED)",
    ]


def test_positions_and_times_are_where_it_happened() -> None:
    scene = Watched()
    scene.live(3)
    request = scene.lab.arrive(10, max_tokens=3)
    arrived_ns = scene.now_ns
    scene.run_until_idle(seconds=0.5)
    ended_ns = scene.now_ns
    lines = of_request(scene, request.number)
    assert lines[0].what == "arrived"
    assert lines[0].at_ns == arrived_ns
    assert lines[-1].at_ns == ended_ns
    assert lines == sorted(lines, key=lambda line: line.position)
    assert [line.at_ns for line in lines] == sorted(line.at_ns for line in lines)
    batches = {frame.sequence: list(frame.events()) for frame in scene.lab.frames if isinstance(frame, Batch)}
    for line in lines:
        event = batches[line.position.sequence][line.position.event]
        assert Kind(event.kind).name.lower() == line.what
        assert request.number in (event.request, *event.ids)


def test_a_preempted_request_says_for_whom_and_what_it_lost() -> None:
    scene = Watched(total=17, prefix_caching=False)
    first = scene.lab.arrive(24, max_tokens=30)
    second = scene.lab.arrive(24, max_tokens=30)
    scene.run_until_idle()
    history = texts(of_request(scene, second.number))
    lost = scene.ledger.request(second.id)
    assert lost is not None
    assert lost.preemptions == 1
    preempted = next(text for text in history if text.startswith("preempted"))
    assert preempted.startswith(f"preempted (KV_BLOCKS) for {first.id}: releases ")
    assert preempted.endswith(f"loses {lost.tokens_lost} computed tokens")
    after = history[history.index(preempted) + 1 :]
    assert after[0].startswith("released ")
    assert after[0].endswith("(PREEMPTED)")
    assert after[1] == "queued at the front (PREEMPTED)"
    # A state is told when it begins and as its count doubles, not at each of the passes.
    skipped = [text for text in after if text.startswith("skipped (KV_BLOCKS)")]
    assert skipped[:3] == [f"skipped (KV_BLOCKS), {times} so far" for times in ("1 time", "2 times", "4 times")]
    assert any(text.startswith("allocation failed: needs ") for text in after)


def test_a_request_whose_free_is_deferred() -> None:
    scene = finished_held(fault="")
    ended = scene.ledger.ended[0]
    assert texts(of_request(scene, ended.number))[-4:] == [
        f"finished: {Status.FINISHED_LENGTH_CAPPED.name}",
        f"the free of {ended.peak_blocks} blocks is deferred (CONNECTOR)",
        "the connector reported that it no longer needs the blocks",
        f"released {ended.peak_blocks} blocks (TRANSFER_DONE)",
    ]


def test_what_an_abort_left_ends_without_a_release() -> None:
    scene = unaccounted()
    (affected,) = scene.lab.faults.on["leak.unaccounted"].affected
    record = scene.ledger.request(affected)
    assert record is not None
    assert texts(of_request(scene, record.number))[-1] == "finished: FINISHED_ABORTED"


def test_a_shared_block_from_hand_to_hand() -> None:
    scene = unaccounted(fault="")
    scene.run_until_idle()
    block = next(b for b, texts_of in _stories(scene).items() if sum("prefix hit" in t for t in texts_of) == 2)
    assert _stories(scene)[block] == [
        "allocated to request r-1",
        "full, and entered in the prefix cache by request r-1",
        "prefix hit: request r-2 took a reference",
        "prefix hit: request r-3 took a reference",
        "released by request r-1 (ABORTED)",
        "released by request r-2 (FINISHED)",
        "released by request r-3 (FINISHED)",
    ]


def _stories(scene: Watched) -> dict[int, list[str]]:
    return {block: texts(of_block(scene, block)) for block in range(1, scene.lab.pool.total)}


def test_audits_that_agree_are_no_event_in_a_blocks_life() -> None:
    scene = Watched()
    scene.lab.arrive(10, max_tokens=3)
    scene.run_until_idle()
    before = _stories(scene)
    scene.live(10)
    assert scene.ledger.state.audit_cycles > 1
    assert _stories(scene) == before


def test_a_reset_of_the_prefix_cache() -> None:
    scene = Watched()
    scene.lab.arrive(10, max_tokens=3)
    scene.run_until_idle()
    cached = next(b for b in range(1, scene.lab.pool.total) if scene.lab.pool.digests[b] is not None)
    assert scene.lab.pool.reset_prefix_cache()
    scene.steps(1)
    assert _stories(scene)[cached][-1] == "lost its place in the prefix cache (RESET)"


def test_the_front_end_a_client_that_goes_and_the_watchdog() -> None:
    scene = Spoken()
    scene.log.received(7, "r-7", 12)
    scene.say()
    scene.arrive(7, [3, 4, 5])
    scene.say()
    scene.clock.sleep(2)
    scene.log.client_gone(7)
    scene.log.stalled(7, Status.RUNNING, 0, Cause.NONE)
    gone_ns = scene.clock.time_ns()
    scene.clock.sleep(3)
    scene.say()
    lines = of_request(scene, 7)
    assert lines[0].text == "received at the front end, 12 prompt tokens"
    reported = {line.what: line for line in lines}
    assert reported["client_gone"].text == "the client closed the connection"
    assert reported["stalled"].text == "the engine's watchdog: no progress since step 0 (NONE)"
    # What other threads say carries its own time.
    assert reported["client_gone"].at_ns == reported["stalled"].at_ns == gone_ns


def test_waits_for_something_outside_the_scheduler() -> None:
    scene = Spoken()
    scene.arrive(7, [3])
    scene.log.waiting_on(7, Status.WAITING_FOR_REMOTE_KVS)
    scene.log.remote_load(7, Load.DELIVERED, 4)
    scene.log.ready(7)
    scene.say()
    assert texts(of_request(scene, 7))[-3:] == [
        "waits: WAITING_FOR_REMOTE_KVS",
        "fetch of 4 tokens of remote KV DELIVERED",
        "what it waited for is ready",
    ]


def test_numbers_of_a_newer_engine_keep_their_number() -> None:
    scene = Spoken()
    scene.arrive(7, [3])
    scene.log.finished(7, 99)  # type: ignore[arg-type]
    scene.log.released(7, [3], 98)  # type: ignore[arg-type]
    scene.say()
    assert texts(of_request(scene, 7))[-2:] == ["finished: UNKNOWN(99)", "released 1 block (UNKNOWN(98))"]
    assert texts(of_block(scene, 3))[-1] == "released by request r-7 (UNKNOWN(98))"


def test_a_newer_engine_may_append_fields_to_a_preemption() -> None:
    scene = Spoken()
    scene.arrive(7, [3])
    scene.say()
    at = {"wall_ns": scene.clock.time_ns(), "mono_ns": scene.clock.monotonic_ns()}
    newer = Run(Kind.PREEMPTED, 0, 7, [Preempt.KV_BLOCKS, -1, 1, 4, 99], [])
    scene.watch.feed([batch_of(ENGINE, scene.packer.epoch, [newer], sequence=scene.packer.next_sequence, **at)])
    assert texts(of_request(scene, 7))[-1] == "preempted (KV_BLOCKS): releases 1 block, loses 4 computed tokens"


def test_a_story_without_its_beginning_begins_where_it_is_known() -> None:
    scene = Watched()
    request = scene.lab.arrive(10, max_tokens=30)
    scene.steps(10)
    joined = Watched()
    joined.watch.fleet.engines.clear()
    joined.watch.feed([scene.lab.keyframe()])
    seen = len(scene.lab.frames)
    scene.run_until_idle()
    joined.watch.feed(scene.lab.frames[seen:])
    detail = joined.watch.request(joined.ledger.engine, request.id)
    assert not detail.event_history_complete
    whole = scene.watch.request(scene.ledger.engine, request.id)
    assert whole.event_history_complete
    assert detail.event_history[-2:] == whole.event_history[-2:]
