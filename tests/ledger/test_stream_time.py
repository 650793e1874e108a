"""Clocks that jump, drift, stop or start in the past; engines of one name; sources of one engine."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.kinds import Kind, Layer, Stage
from kvscope.monitor.contract.wire import STACK_TEXT, Run, batch_of
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.stream_clock import (
    ENOUGH,
    EPOCH_SILENT_NS,
    JUMP_NS,
    EpochOverlaps,
    StreamClock,
    is_next_epoch,
)
from kvscope.monitor.questions.pipeline import Pipeline

ENGINE = "lab@127.0.0.1:0/0"
S = 1_000_000_000
HOUR = 3_600 * S


@dataclass
class Clocks:
    """Of an engine's machine and of the reader's: real time, seen through wrong clocks."""

    now_ns: int = 1_700_000_000 * S
    wall_off_ns: int = 0
    rate: float = 1.0
    """Of the engine's wall clock."""
    began_ns: int = 1_700_000_000 * S
    reader_off_ns: int = 0
    boot_ns: int = 1_699_990_000 * S
    suspended_ns: int = 0

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * S)

    def time_ns(self) -> int:
        return self.now_ns + self.wall_off_ns + round((self.now_ns - self.began_ns) * (self.rate - 1))

    def monotonic_ns(self) -> int:
        return self.now_ns - self.boot_ns - self.suspended_ns


class Watched:
    """A lab with a leak whose frames reach a pipeline as they are sent, and a reader that stores its clocks."""

    def __init__(self, clocks: Clocks, pipeline: Pipeline | None = None, leaks: bool = True) -> None:
        self.clocks = clocks
        self.pipeline = pipeline or Pipeline()
        faults = ["leak.finished-held:every=2"] if leaks else []
        self.lab = Lab(total=64, connector_share=1.0, faults=faults, clock=clocks)
        self.fed = 0
        for _ in range(6):
            self.lab.arrive(9, max_tokens=3)

    @property
    def ledger(self) -> EngineLedger:
        return self.pipeline.fleet.engines[ENGINE]

    def feed(self) -> None:
        self.pipeline.feed(self.lab.frames[self.fed :])
        self.fed = len(self.lab.frames)

    def live(self, seconds: int) -> None:
        for _ in range(seconds):
            for _ in range(4):
                self.clocks.sleep(0.25)
                self.lab.step()
            self.lab.heartbeat()
            self.feed()
            self.observe()

    def silence(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clocks.sleep(1)
            self.observe()

    def observe(self) -> None:
        """As LiveStream does once a second."""
        wall_ns = self.clocks.now_ns + self.clocks.reader_off_ns
        mono_ns = self.clocks.now_ns - 1_699_999_000 * S
        event = Run(Kind.OBSERVED, 0, -1, [wall_ns], [])
        self.pipeline.feed([batch_of(ENGINE, self.lab.packer.epoch, [event], wall_ns=wall_ns, mono_ns=mono_ns)])

    def codes(self) -> set[str]:
        self.pipeline.settle()
        return {found.code for found in self.pipeline.findings("firing")}

    def silent_s(self) -> float:
        return (self.ledger.now_ns - self.ledger.last_received_ns) / S


JUMPS = [S * 10, HOUR, -HOUR, 24 * HOUR, -24 * HOUR]


@pytest.mark.parametrize("jump_ns", [0, *JUMPS])
def test_a_leak_is_found_on_time_whatever_the_engines_wall_clock_does(jump_ns: int) -> None:
    watched = Watched(Clocks())
    watched.live(3)
    watched.clocks.wall_off_ns = jump_ns
    watched.live(12)
    codes = watched.codes()
    assert "leak.finished-held" in codes
    assert ("blind.clock-jump" in codes) == bool(jump_ns)
    assert "stuck.engine-stalled" not in codes
    assert watched.silent_s() < 2


@pytest.mark.parametrize("ahead_ns", JUMPS)
def test_one_frame_with_another_wall_clock_changes_nothing(ahead_ns: int) -> None:
    watched = Watched(Clocks())
    watched.live(3)
    watched.clocks.wall_off_ns = ahead_ns
    watched.lab.heartbeat()
    watched.clocks.wall_off_ns = 0
    watched.live(12)
    assert "leak.finished-held" in watched.codes()
    watched.silence(20)
    assert 18 < watched.silent_s() < 22


@pytest.mark.parametrize("reader_ns", JUMPS)
def test_silence_is_measured_by_the_readers_monotonic_clock(reader_ns: int) -> None:
    watched = Watched(Clocks())
    watched.live(5)
    watched.clocks.reader_off_ns = reader_ns
    watched.live(5)
    assert watched.silent_s() < 2
    assert "stuck.engine-stalled" not in watched.codes()
    watched.silence(60)
    assert 58 < watched.silent_s() < 62


@pytest.mark.parametrize("wall_off_ns", JUMPS)
def test_the_engine_and_its_reader_disagree_about_the_time_of_day(wall_off_ns: int) -> None:
    watched = Watched(Clocks(wall_off_ns=wall_off_ns))
    watched.live(12)
    assert "leak.finished-held" in watched.codes()
    assert "blind.clock-jump" not in watched.codes()
    assert watched.silent_s() < 2
    watched.silence(60)
    assert 58 < watched.silent_s() < 62


@pytest.mark.parametrize("rate", [1.0005, 0.9995])
def test_a_clock_that_drifts_is_followed(rate: float) -> None:
    """By half a millisecond a second, the most that NTP slews: for an hour that is two seconds."""
    watched = Watched(Clocks(rate=rate), leaks=False)
    for _ in range(3_600):
        watched.clocks.sleep(1)
        watched.lab.heartbeat()
        watched.feed()
        watched.observe()
    assert "blind.clock-jump" not in watched.codes()
    assert abs(watched.ledger.now_ns - watched.clocks.time_ns()) < 2.5 * S
    assert watched.silent_s() < 2.5


def test_a_suspended_machine_goes_on_where_it_is() -> None:
    """Its wall clock jumps ahead, its monotonic clock does not count the hour, the reader's does."""
    watched = Watched(Clocks())
    watched.live(3)
    watched.silence(600)
    watched.clocks.suspended_ns = 600 * S
    watched.live(12)
    assert watched.silent_s() < 2
    assert "leak.finished-held" in watched.codes()


@pytest.mark.parametrize("ahead_ns", [0, JUMP_NS, JUMP_NS + 1])
def test_a_machine_was_suspended_if_its_reader_is_ahead_by_more_than_a_jump(ahead_ns: int) -> None:
    """Its wall clock jumps by ten seconds between two frames a second apart."""
    clock = StreamClock()
    stream_ns = clock.frame(HOUR, S, 0, 0, (1, 0))
    slewed_ns = clock.frame(HOUR + 11 * S, 2 * S, stream_ns, stream_ns, (1, 1))
    again = StreamClock()
    again.frame(HOUR, S, 0, 0, (1, 0))
    found_ns = again.frame(HOUR + 11 * S, 2 * S, slewed_ns + ahead_ns, stream_ns, (1, 1))
    assert found_ns == slewed_ns + (ahead_ns if ahead_ns > JUMP_NS else 0)


@pytest.mark.parametrize("later_ns", [-HOUR, -24 * HOUR, HOUR])
def test_a_restart_into_the_past_is_followed_once_its_predecessor_is_silent(later_ns: int) -> None:
    first = Watched(Clocks(), leaks=False)
    first.live(5)
    first.silence(6)
    clocks = first.clocks
    clocks.wall_off_ns = later_ns
    second = Watched(clocks, first.pipeline)
    assert (second.lab.packer.epoch < first.lab.packer.epoch) == (later_ns < 0)
    # Its reader begins with a keyframe, or the engine's first batch after a heartbeat.
    second.lab.frames.insert(0, second.lab.keyframe())
    second.live(14)
    assert second.ledger.epoch == second.lab.packer.epoch
    assert second.ledger.restarts == 1
    assert "leak.finished-held" in second.codes()
    assert not {"stuck.engine-stalled", "blind.name-clash", "blind.clock-jump"} & second.codes()
    assert second.silent_s() < 2


def test_an_earlier_epoch_follows_one_that_has_been_silent_for_long_enough() -> None:
    keyframe = Lab().keyframe()
    assert is_next_epoch(keyframe, keyframe.epoch + 1, EPOCH_SILENT_NS)
    assert not is_next_epoch(keyframe, keyframe.epoch + 1, EPOCH_SILENT_NS - 1)


def test_another_epoch_is_alive_since_its_first_recent_heartbeat() -> None:
    lab, overlaps = Lab(), EpochOverlaps()
    for second in range(1, ENOUGH):
        overlaps.note_other(lab.heartbeat(), second * S)
        overlaps.note_other(lab.keyframe(), second * S)  # which a reader that joins asks for
    assert overlaps.other_epochs(ENOUGH * S) == (0, [])
    overlaps.note_other(lab.heartbeat(), ENOUGH * S)
    assert overlaps.other_epochs(ENOUGH * S) == (S, [lab.packer.epoch])


def test_two_engines_of_one_name_are_reported_and_one_of_them_is_shown() -> None:
    clocks = Clocks()
    first = Watched(clocks, leaks=False)
    clocks.sleep(100)
    second = Watched(clocks, first.pipeline, leaks=False)
    for _ in range(20):
        clocks.sleep(1)
        for each in (first, second):
            each.lab.heartbeat()
            each.feed()
    assert second.ledger.epoch == second.lab.packer.epoch
    assert second.ledger.restarts == 1
    assert "blind.name-clash" in second.codes()
    second.live(30)  # the first is gone
    assert "blind.name-clash" not in second.codes()


def test_a_restart_is_no_clash() -> None:
    clocks = Clocks()
    first = Watched(clocks, leaks=False)
    first.live(5)
    second = Watched(clocks, first.pipeline, leaks=False)
    for _ in range(2):  # the tail of the first, which comes late
        first.lab.heartbeat()
    second.live(5)
    first.feed()
    assert "blind.name-clash" not in second.codes()


def test_two_sources_of_one_engine_are_reported() -> None:
    watched = Watched(Clocks(), leaks=False)
    for _ in range(10):
        watched.live(1)
        watched.pipeline.feed(watched.lab.frames[-6:])
    assert "blind.duplicate-source" in watched.codes()
    assert not watched.ledger.losses


def test_a_replay_that_repeats_is_no_second_source() -> None:
    watched = Watched(Clocks(), leaks=False)
    watched.live(30)
    watched.pipeline.feed(watched.lab.frames[:-20])
    assert "blind.duplicate-source" not in watched.codes()


def test_a_source_reports_the_stack_of_an_engine_that_cannot() -> None:
    watched = Watched(Clocks(), leaks=False)
    watched.live(2)
    stack = Run(Kind.STACK, 0, -1, [0, -1, 0, Layer.CONNECTOR], [])
    watched.pipeline.feed([batch_of(ENGINE, watched.lab.packer.epoch, [stack], texts={STACK_TEXT: "here\nthere"})])
    found = watched.ledger.state.stack
    assert found is not None
    assert (found.layer, found.frames) == (Layer.CONNECTOR, "here\nthere")
    assert watched.ledger.age_s(found.at_ns) == 0


def test_a_source_that_names_an_unknown_stage_is_believed_about_the_loss() -> None:
    watched = Watched(Clocks(), leaks=False)
    watched.live(2)
    for args in ([5, 9, 99], [], [7]):
        watched.pipeline.feed([batch_of(ENGINE, watched.lab.packer.epoch, [Run(Kind.LOST, 0, -1, args, [])])])
    assert [loss.stage for loss in watched.ledger.losses] == [Stage.TRANSPORT] * 3
    assert watched.ledger.losses[0].batches == 5
    assert watched.ledger.uncertain_since_ns


def test_points_are_kept_for_an_hour_however_seldom_they_come() -> None:
    """Else memory would go on growing for as long as the engine's pauses make their number smaller."""
    lab, ledger = Lab(), EngineLedger(ENGINE)
    for _ in range(500):
        lab.arrive(5)
        lab.step(10)
    for frame in lab.frames:
        ledger.apply(frame)
    assert 3590 <= (ledger.points[-1].at_ns - ledger.points[0].at_ns) / 1e9 <= 3600
