"""`monitor explain event`, from the command line to what is printed and returned."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvscope.lab.stepped_recordings import leaking_lab, recording_of
from kvscope.monitor.contract.kinds import Kind
from kvscope.monitor.sources.recording import Recording
from kvscope.monitor.terminal.cli import main


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished requests that keep their blocks."""
    return recording_of(leaking_lab(), tmp_path_factory.mktemp("explained") / "a")


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--format", "json"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


def test_what_the_doctor_says_to_look_at_opens(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(recording)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    command = re.search(r"Look monitor (explain event \d+/\d+/\d+) (\S+) ", printed)
    assert command is not None
    assert command[2] == str(recording)
    assert main([*command[1].split(), str(recording)]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines()[1:])) <= 80
    (finding,) = as_json(capsys, "doctor", str(recording))["findings"]
    first = finding["culprits"]["requests"][0]
    assert f"free_deferred {first}: the free of" in " ".join(shown.split())
    assert [line for line in shown.splitlines() if line.isupper() and line[0] != " "] == ["AROUND IT", "JUST AFTER IT"]
    assert shown.count("▸") == 1


def test_the_pool_the_request_and_the_block_are_those_just_after_it(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (finding,) = as_json(capsys, "doctor", str(recording))["findings"]
    held = next(item for item in finding["evidence"] if item["name"] == "blocks_held")
    reported = as_json(capsys, "explain", "event", held["position"], str(recording))
    assert reported["event"]["position"] == held["position"]
    assert reported["request"]["request"]["id"] == finding["culprits"]["requests"][-1]
    assert reported["request"]["request"]["deferred"]
    assert reported["pool"]["balance"]["finished"] == held["value"]
    assert reported["block"]["block"] == reported["event"]["blocks"][0]
    places = [tuple(map(int, one["position"].split("/"))) for one in reported["around"]]
    assert places == sorted(places)
    before = as_json(capsys, "explain", "event", finding["position"], str(recording))
    assert before["pool"]["balance"]["finished"] < held["value"]


@pytest.mark.slow
def test_an_event_of_any_kind_can_be_opened(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[int, str] = {}
    for frame in Recording(recording):
        for index, event in enumerate(frame.events()):  # type: ignore[union-attr]
            seen.setdefault(event.kind, f"{frame.epoch}/{frame.sequence}/{index}")
    assert {Kind.STARTED, Kind.CLOCK, Kind.PROGRESSED, Kind.AUDIT_BLOCKS, Kind.RELEASED} <= seen.keys()
    for kind, position in seen.items():
        reported = as_json(capsys, "explain", "event", position, str(recording))
        assert reported["event"]["kind"] == Kind(kind).name.lower()
        assert position in [one["position"] for one in reported["around"]]


def test_what_is_asked_wrongly(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("12", "1/2", "noon", "1/2/x"):
        assert main(["explain", "event", wrong, str(recording)]) == 2
        assert f"'{wrong}' is not a position of an event: give epoch/sequence/event" in capsys.readouterr().err
    (finding,) = as_json(capsys, "doctor", str(recording))["findings"]
    epoch, sequence, _ = finding["position"].split("/")
    for missing in (f"{epoch}/999999/0", f"1/{sequence}/0"):
        assert main(["explain", "event", missing, str(recording)]) == 3
        assert missing in capsys.readouterr().err
    assert main(["explain", "event", f"{epoch}/{sequence}/99999", str(recording)]) == 3
    assert "no event" in capsys.readouterr().err
    assert main(["explain", "event", finding["position"], str(recording), "--engine", "another"]) == 3
    assert "another" in capsys.readouterr().err
