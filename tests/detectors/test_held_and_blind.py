"""held.* and blind.*: information, so that nobody goes looking for a leak, nor takes silence for rest."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvscope.monitor.contract.kinds import SCHEMA, Kind, Limit, Release, Stage, Status
from kvscope.monitor.contract.samples import Fact
from kvscope.monitor.contract.wire import Run, batch_of
from kvscope.monitor.detectors.registry import THRESHOLDS
from kvscope.monitor.ledger.memory_breakdown import breakdown_of
from kvscope.monitor.sources.engine_log import Log
from kvscope.monitor.sources.log_file import read_log
from tests.detectors.scenes import ENGINE, Observer, Spoken, Watched, value

DATA = Path(__file__).parent.parent / "data"
PREFIX_CACHE = "held.prefix-cache"
POOL_RESERVED = "held.pool-reserved"
LONG_REQUEST = "held.long-request"
LOG_SILENCE = "blind.log-silence"
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


def test_a_tenth_of_the_pool_is_worth_a_line() -> None:
    """Four of 40 blocks are cached and idle."""
    scene = Spoken(total=41)
    scene.arrive(1, [1, 2, 3, 4])
    scene.log.cached(1, [1, 2, 3, 4], [11, 12, 13, 14])
    scene.log.finished(1, Status.FINISHED_STOPPED)
    scene.log.released(1, [1, 2, 3, 4], Release.FINISHED)
    scene.say()
    assert value(scene.firing(PREFIX_CACHE)[0], "share_of_pool") == 0.1


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


def test_a_long_request_whose_steps_are_slow_is_told_once() -> None:
    """A step takes ten seconds. While it is computed the request gets no token, and stands still by no measure."""
    scene = Spoken()
    scene.arrive(1, list(range(1, 20)))
    found = []
    for step in range(10):
        scene.log.tick()
        scene.log.step_launched(step, [1], [1])
        for _ in range(10):
            scene.wait(1)
            found.append(bool(scene.firing(LONG_REQUEST)))
        scene.log.progressed([1], [76 + step], [step])
        scene.log.step_completed(step, 10_000_000_000, Limit.NONE, 13, 0, 19)
    assert found == sorted(found)
    assert found.count(True) > 90


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
    scene.wait(scene.watch.settings(THRESHOLDS[f"{STREAM_GAP}.remember_s"]) + 5)
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
    assert "IndexError" in str(value(finding, "unreadable_batch"))


# -------------------------------------------------------------------- held.pool-reserved


def with_breakdown(**figures: int) -> Spoken:
    """An engine that has said so much of its device's memory."""
    scene = Spoken()
    scene.log.memory([figures.get(name, -1) for name in SCHEMA[Kind.MEMORY].args])
    scene.say()
    return scene


def test_the_pool_is_told_with_its_share_of_the_device() -> None:
    scene = with_breakdown(device_total=800, device_free=100, kv_pool=600)
    (finding,) = scene.firing()
    assert (finding.code, finding.severity, finding.verdict) == (POOL_RESERVED, "info", "confirmed")
    assert value(finding, "kv_pool") == 600
    assert value(finding, "share_of_device") == 600 / 800


@pytest.mark.parametrize("figures", [{}, {"kv_pool": 600}, {"device_total": 800}, {"device_total": 800, "kv_pool": 8}])
def test_without_a_bill_or_with_a_small_pool_nothing_is_said_of_it(figures: dict[str, int]) -> None:
    assert not with_breakdown(**figures).firing()


def test_the_pool_by_a_logs_bill() -> None:
    records = read_log(DATA / "seed-002.log")[1]
    breakdown, _ = breakdown_of(record for record in records if isinstance(record, Fact))
    observer = Observer()
    observer.watch.feed(records)
    observer.watch.settle()
    (finding,) = [f for f in observer.watch.findings() if f.code == POOL_RESERVED]
    assert (value(finding, "kv_pool"), value(finding, "device_total")) == (breakdown.kv_cache, breakdown.device_total)
    assert finding.evidence[0].source == "log"


# -------------------------------------------------------------------- blind.log-silence


def log_of(*lines: str) -> Observer:
    observer = Observer()
    observer.watch.feed(Log("a.log", datetime(2026, 11, 21, tzinfo=UTC)).records(lines))
    observer.watch.settle()
    return observer


def stats(at: str, running: int, waiting: int = 0, tokens: float = 90.0) -> str:
    """A line as vLLM writes it every ten seconds."""
    return (
        f"INFO 11-21 {at} [loggers.py:271] Engine 000: Avg prompt throughput: {tokens} tokens/s, Avg generation"
        f" throughput: {tokens} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs,"
        f" GPU KV cache usage: {4 * running}.0%"
    )


def other(at: str) -> str:
    return f'INFO 11-21 {at} [async_llm.py:1] "POST /v1/completions HTTP/1.1" 200 OK'


def test_a_log_that_goes_on_without_figures_is_told() -> None:
    observer = log_of(stats("10:00:00", 3), stats("10:00:10", 2, waiting=5), other("10:00:15"), other("10:01:00"))
    (finding,) = observer.firing()
    assert (finding.code, finding.severity, finding.verdict) == (LOG_SILENCE, "info", "confirmed")
    assert (value(finding, "running"), value(finding, "waiting"), value(finding, "silent_s")) == (2, 5, 50)
    assert finding.position == "a.log:2"


def test_probes_show_the_silence_where_lines_have_no_times() -> None:
    probe = 'INFO:     192.0.2.1:1 - "GET /health HTTP/1.1" 200 OK'
    lines = (stats("10:00:00", 3), probe, stats("10:00:10", 3), probe, stats("10:00:20", 3))
    (finding,) = log_of(*lines, *[probe] * 4).firing()
    assert (finding.code, finding.verdict, value(finding, "silent_s")) == (LOG_SILENCE, "confirmed", 40)
    assert not log_of(*lines, probe, probe).firing()


def test_a_log_that_ends_with_a_line_of_no_tokens_cannot_tell() -> None:
    (finding,) = log_of(stats("10:00:00", 3), stats("10:00:10", 3, tokens=0.0)).firing()
    assert (finding.code, finding.verdict) == (LOG_SILENCE, "cannot-tell")
    assert finding.missing


@pytest.mark.parametrize(
    "lines",
    [
        (stats("10:00:00", 3), stats("10:00:10", 0, tokens=0.0), other("10:09:00")),  # all were answered
        (stats("10:00:00", 3), stats("10:00:10", 3), other("10:00:35")),  # not for long enough
        (stats("10:00:00", 3), stats("10:01:00", 3), stats("10:02:00", 3), other("10:03:00")),  # lines are rarer here
        (stats("10:00:00", 3), stats("10:00:10", 3)),  # the log was read while the engine worked
    ],
)
def test_a_log_that_is_not_silent_is_not_called_so(lines: tuple[str, ...]) -> None:
    assert not log_of(*lines).firing()


def test_a_real_log_of_an_engine_whose_blocks_never_came_back_falls_silent() -> None:
    observer = Observer()
    observer.watch.feed(read_log(DATA / "never-freed.log.gz")[1])
    observer.watch.settle()
    (finding,) = observer.firing(LOG_SILENCE)
    assert (finding.verdict, value(finding, "running")) == ("confirmed", 0)
    assert value(finding, "waiting") == observer.watch.engines()[0].waiting
