"""The chaos run: four faults with `make slow`, a hundred with `make prove`."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from kvscope.lab.chaos.arena import Arena, Delivered, open_alerts, repeats, under_two_ids, wait_for
from kvscope.lab.chaos.chaos import LEAK, NOTICE_S, ChaosRound, line_of, run_rounds, table_of_faults
from kvscope.lab.chaos.chaos_faults import ChaosFault, FullDisk, ReadOnlyData, possible_faults
from kvscope.lab.chaos.history_check import HistoryCheck
from kvscope.lab.chaos.link import SmallDisk


def delivered(message: str, alert: str, state: str) -> Delivered:
    return Delivered(0.0, message, alert, state, "engine", "code")


def test_an_alert_that_was_sent_as_resolved_is_not_open() -> None:
    firing = delivered("1", "a", "firing")
    assert open_alerts([firing]) == {"a"}
    assert open_alerts([firing, delivered("2", "a", "resolved")]) == set()
    assert open_alerts([firing], engine="another") == set()


def test_a_message_that_comes_twice_is_counted_and_two_ids_of_one_transition_are_named() -> None:
    once, again = delivered("1", "a", "firing"), delivered("1", "a", "firing")
    assert not repeats([once])
    assert repeats([once, again]) == {"1": 1}
    assert not under_two_ids([once, again])
    assert under_two_ids([once, delivered("2", "a", "firing")]) == [("a", "firing")]


def test_a_round_is_one_line_and_a_fault_one_row() -> None:
    held = ChaosRound(3, ["link cut", "hostile asker"], ["", "engine 4"], [3.2, None], "engine 1", [], 0, 12.0)
    assert line_of(held).endswith("incident of engine 1: held (12 s)")
    assert "link cut noticed after 3.2 s + hostile asker (engine 4);" in line_of(held)
    rows = table_of_faults([held]).splitlines()
    assert [row.split()[:3] for row in rows[1:]] == [["hostile", "asker", "1"], ["link", "cut", "1"]]


def test_a_small_disk_is_full_and_has_space_again(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "disk")
    try:
        if disk.reason:
            pytest.skip(disk.reason)
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (disk.directory / "more").write_bytes(bytes(1 << 16))
        disk.free()
        assert (disk.directory / "more").write_bytes(bytes(1 << 16)) == 1 << 16
    finally:
        disk.close()


def problems_of_run(faults: int, seed: int, results: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with capsys.disabled():
        print()
        rounds = run_rounds(faults, seed, results)
        print(table_of_faults(rounds))
    return [line_of(each) for each in rounds if each.problems]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FullDisk, ReadOnlyData])
def test_a_directory_that_cannot_be_written_is_reported_and_what_it_had_stays(
    tmp_path: Path, kind: type[ChaosFault]
) -> None:
    with Arena(tmp_path) as arena:
        if kind not in possible_faults(arena)[0]:
            pytest.skip("it cannot be caused here")
        assert wait_for(arena.is_settled, 60) >= 0
        history, engine = HistoryCheck(arena), 3
        joined = history.batches(engine)[-1].sequence
        arena.set_leak(engine, True)
        assert wait_for(lambda: open_alerts(arena.received()), 60) >= 0
        kept = [batch for batch in history.batches(engine) if batch.sequence > joined][:-10]
        fault = kind(arena, random.Random(0))
        is_reported = fault.notice()
        assert is_reported is not None
        assert not is_reported()
        fault.begin()
        assert 0 <= wait_for(is_reported, 60, 0.05) < NOTICE_S
        assert not history.missing_events(engine, kept)
        fault.end()
        assert wait_for(lambda: not is_reported(), 60) >= 0
        arena.restart_monitor()
        assert wait_for(arena.is_settled, 60) >= 0
        assert not history.missing_events(engine, kept)
        arena.set_leak(engine, False)
        assert wait_for(lambda: not open_alerts(arena.received(), code=LEAK), 60) >= 0


@pytest.mark.slow
def test_nothing_is_lost_in_four_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not problems_of_run(4, 2126, tmp_path / "chaos.jsonl", capsys)


@pytest.mark.prove
def test_nothing_is_lost_in_a_hundred_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not problems_of_run(100, time.time_ns() % (1 << 31), tmp_path / "chaos.jsonl", capsys)
