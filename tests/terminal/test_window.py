"""`monitor doctor --since --until`: what fired at some moment of a part of the past, as it was at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvscope.lab.recorded_pages import page, rows, served
from kvscope.lab.stepped_engine import Lab
from kvscope.lab.stepped_recordings import recording_of
from kvscope.monitor.base.errors import BadTarget
from kvscope.monitor.base.text import moment, timestamp
from kvscope.monitor.questions.observe import Window, when
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.terminal.cli import main
from tests.terminal.test_doctor import DATA, doctor_json
from tests.test_api import served as api

NOON = moment("2026-01-31T12:00:00Z", 0)


def ended_leak() -> Lab:
    """For half a minute a connector keeps blocks, gives them back, and for half a minute nothing is wrong."""
    lab = Lab(total=101, block_size=16, connector_share=1.0, seed=1)
    assert lab.connector is not None
    lab.connector.polls_needed = 1_000_000_000
    for _ in range(4):
        lab.arrive(60, max_tokens=4)
    for polls in (0, 2_000_000_000):
        lab.connector.polls += polls
        for _ in range(60):
            lab.step(seconds=0.5)
            lab.heartbeat()
    return lab


@pytest.fixture(scope="module")
def lab() -> Lab:
    return ended_leak()


def looked_at(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    _, printed = doctor_json(capsys, *arguments)
    found = [f for f in printed["findings"] if f["code"] == "leak.finished-held"]
    return (found[0] if found else None), printed["balances"][0]


@pytest.mark.parametrize("by", ["recording", "service"])
def test_what_fired_in_the_window_as_it_was_at_its_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, lab: Lab, by: str
) -> None:
    watch = Pipeline()
    watch.feed(lab.frames)
    with api(watch) as url:
        target = url if by == "service" else recording_of(lab, tmp_path)
        whole, balance = looked_at(capsys, recording_of(lab, tmp_path))
        assert whole is not None
        assert balance["finished"] == 0
        at_resolution = moment(whole["resolved_at"], 0)
        before, long_before, after = (timestamp(at_resolution + seconds * 1_000_000_000) for seconds in (-5, -28, 5))
        held, balance = looked_at(capsys, target, "--until", before)
        assert held is not None
        assert (held["state"], held["resolved_at"], balance["finished"]) == (
            "firing",
            None,
            len(held["culprits"]["blocks"]),
        )
        assert balance["finished"] > 0
        over, balance = looked_at(capsys, target, "--since", before)
        assert over is not None
        assert (over["state"], balance["finished"]) == ("resolved", 0)
        assert looked_at(capsys, target, "--since", after)[0] is None
        assert looked_at(capsys, target, "--until", long_before)[0] is None


def test_a_recording_has_nothing_of_before_it_began(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, lab: Lab
) -> None:
    code, printed = doctor_json(capsys, recording_of(lab, tmp_path), "--until", "1d")
    assert code == 3
    assert "begins at" in printed["targets"][0]["error"]


def test_of_a_log_only_the_window_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    log = DATA / "never-freed.log.gz"
    whole, balance = looked_at(capsys, log)
    assert whole is not None
    end = balance["at"]
    assert looked_at(capsys, log, "--until", "60s")[1]["at"] < end
    _, printed = doctor_json(capsys, log, "--since", "2m")
    assert any("was judged" in note for note in printed["targets"][0]["notes"])
    assert doctor_json(capsys, log, "--until", "1d")[0] == 3


def test_what_has_no_past(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with served(page(rows("never-freed")[0])) as server:
        for target in (server.url, f"ipc://{tmp_path}/nobody"):
            code, printed = doctor_json(capsys, target, "--since", "5m")
            assert code == 2
            assert "live" in printed["targets"][0]["error"]
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", str(DATA / "seed-000.log"), "--since", "yesterday"])
    assert "14:02:11" in capsys.readouterr().err


def test_when() -> None:
    assert when("90s", NOON) == NOON - 90 * 10**9
    assert when("11:58:30", NOON) == when("2026-01-31T11:58:30Z", NOON) == when("90s", NOON)
    assert Window("90s", "").span(NOON) == (when("90s", NOON), NOON)
    assert Window("", "90s").span(NOON) == (0, when("90s", NOON))
    assert Window("", "2026-02-01T00:00:00Z").span(NOON).until_ns == NOON
    with pytest.raises(BadTarget, match="nothing to look at: --since must be earlier than --until"):
        Window("90s", "2m").span(NOON)
    with pytest.raises(BadTarget, match="nothing to look at: what there is ends with the second"):
        Window("2026-02-01T00:00:00Z", "").span(NOON)
