"""`monitor explain drop`, from the command line to what is printed and returned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvscope.lab.stepped_recordings import recording_of
from kvscope.monitor.base.text import timestamp
from kvscope.monitor.terminal.cli import main
from tests.detectors.scenes import Watched, lockstep, stalled
from tests.detectors.waste import preempt_all


def reported(capsys: pytest.CaptureFixture[str], scene: Watched, directory: Path, *arguments: str) -> str:
    recording = recording_of(scene.lab, directory)
    assert main(["explain", "drop", str(recording), *arguments]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_requests_that_finish_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = reported(capsys, lockstep(), tmp_path / "a", "--window", "4")
    stated = " ".join(text.split())
    assert "Usage fell from" in stated
    assert " blocks became free (" in stated
    assert " finished). " in stated
    assert "no preemption" in stated
    assert [line for line in text.splitlines() if line.isupper()] == ["BLOCKS", "REQUESTS", "STEPS"]


def test_requests_that_are_preempted_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    scene = preempt_all()
    text = reported(capsys, scene, tmp_path / "a", "--window", "4")
    assert f"{sum(scene.ledger.state.totals.preemptions.values())} preemptions" in " ".join(text.split())
    assert " for r-2 (KV_BLOCKS): " in text


def test_throughput_that_vanishes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nothing falls, and no step ends."""
    scene = stalled()
    middle = timestamp(scene.now_ns + 2_000_000_000)
    assert middle is not None
    scene.beat(8)
    text = " ".join(reported(capsys, scene, tmp_path / "a", "--at", middle, "--window", "4").split())
    assert "Usage did not fall" in text
    assert f"0 tokens were generated, {scene.ledger.state.totals.output_tokens} in as long before" in text
    assert "no step ended for 4.0 s" in text


def test_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    scene = lockstep()
    assert main(["explain", "drop", str(recording_of(scene.lab, tmp_path / "a")), "--format", "json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["unexplained_blocks"] == 0
    assert (
        report["used_before"] + report["allocated"] - sum(f["blocks"] for f in report["freed"]) == report["used_after"]
    )


def test_what_is_asked_wrongly(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recording = str(recording_of(lockstep(waves=1).lab, tmp_path / "a"))
    with pytest.raises(SystemExit) as usage:
        main(["explain", "drop", recording, "--at", "noon"])
    assert usage.value.code == 2
    assert "'noon' is not a time" in capsys.readouterr().err
    assert main(["explain", "drop", recording, "--engine", "another"]) == 3
    assert "another" in capsys.readouterr().err
    # Another day: nothing of it is kept, and that is said.
    assert main(["explain", "drop", recording, "--at", "2020-01-01T00:00:00Z"]) == 3
    assert "is not kept" in capsys.readouterr().err
