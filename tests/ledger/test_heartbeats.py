"""What heartbeats in a row show of passes, of steps and of sleeps. Steps are numbered from 0."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvscope.monitor.ledger.durations import OutsideWait
from kvscope.monitor.ledger.heartbeat_history import HeartbeatHistory, LateSends
from kvscope.monitor.ledger.records import Heartbeat

S = 1_000_000_000
NO_STEP = -1


def heartbeat(at_s: float, step: int = NO_STEP, waiting: int = 0, polls: int = 1, passes: int = 0) -> Heartbeat:
    return Heartbeat(round(at_s * S), 0, 0, step, 0, 0, waiting, 0, polls, passes)


def history(*beats: Heartbeat) -> HeartbeatHistory:
    found = HeartbeatHistory()
    for before, last in zip((None, *beats), beats, strict=False):
        found.add(before, last, last.at_ns, 0, asks_in_passes=False)
    return found


@pytest.mark.parametrize("steps", [(0, NO_STEP), (NO_STEP, 0), (0, 0)])
def test_an_engine_does_not_sleep_in_its_first_step(steps: tuple[int, int]) -> None:
    assert history(*(heartbeat(at_s, step) for at_s, step in enumerate(steps, start=1))).slept_until_ns == 0


def test_an_engine_sleeps_between_two_heartbeats_without_a_pass_or_a_step() -> None:
    found = history(heartbeat(1, passes=3), heartbeat(2, passes=4), heartbeat(3, passes=4))
    assert (found.slept_since_ns, found.slept_until_ns) == (1 * S, 3 * S)


@pytest.mark.parametrize(("step", "lengths"), [(0, [1]), (7, [1]), (NO_STEP, [2, 1])])
def test_the_queue_counts_once_in_each_step(step: int, lengths: list[int]) -> None:
    found = history(heartbeat(1, step, waiting=2), heartbeat(2, step, waiting=1))
    assert [length.requests for length in found.queue_lengths] == lengths


@pytest.mark.parametrize(("step", "slept"), [(NO_STEP, True), (0, False)])
def test_a_transfer_is_late_only_if_no_step_ran_before_its_end_was_learned(step: int, slept: bool) -> None:
    """Its end comes a second after an hour without polls. The engine had polled before that."""
    sends, sent = LateSends(), OutsideWait(5 * S, 3_611 * S, 4)
    asleep = [heartbeat(10, step), heartbeat(3_610, step)]
    beats = [heartbeat(9, step, polls=0), *asleep, heartbeat(3_611, polls=2), heartbeat(3_612, polls=3)]
    for before, last in pairwise(beats):
        sends.look(before, last, last.connector_polls > before.connector_polls, 0, [sent])
    assert [(late.sent, late.slept_s) for late in sends.recent] == ([(sent, 3_600.0)] if slept else [])
