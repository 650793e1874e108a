"""What a person is told of six incidents is what was read and found good, and each number comes from somewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monitor.events.kinds import Kind
from monitor.events.wire import Batch, Run
from monitor.ledger.words import duration, percent
from monitor.sources.recording import Recording
from tests.doctor import golden
from tests.doctor.golden import GOLDEN, RECORDING, TOLD

ANEW = "read what has changed, then: python -m tests.doctor.golden"
NUMBER = re.compile(r"(?<![\w.,-])\d(?:[\d,]*\d)?(?:\.\d+)?(?![\w]|-\d)")
NO_NUMBERS = re.compile(
    r"\d+/\d+/\d+|\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d(\.\d+)?|\d+-\d+"  # times, ranges of blocks
    r"|\b[a-z]+-\d+\b|reference count 0|kvscope \S+|:[a-z]+=\d+|lab@\S+"  # names
)
ADVICE = ("Do now", "Change", "Won't help", "To be sure", "Runbook")


@pytest.fixture(scope="module", params=TOLD)
def code(request: pytest.FixtureRequest) -> Iterator[str]:
    """One of the incidents, recorded in what is now the current directory."""
    with golden.recorded(request.param):
        yield request.param


def test_what_is_printed(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for path, text in golden.outputs(code).items():
        assert text == path.read_text(), f"{path.name}: {ANEW}"
        assert max(map(len, text.splitlines()[1:])) <= 80


def test_no_file_is_left_over() -> None:
    wanted = {f"{code}.{name}.txt" for code, told in TOLD.items() for name in (*told.commands, "top")}
    assert {path.name for path in GOLDEN.iterdir()} == wanted


# -------------------------------------------------------------------- every number comes from somewhere


def test_each_number_is_in_the_evidence_and_the_evidence_in_the_stream(code: str) -> None:
    printed = json.loads(golden.printed("doctor", RECORDING, "--format", "json").partition("\n")[2].rpartition("(")[0])
    events = dict(_events(Path(RECORDING)))
    told = _without_advice((GOLDEN / f"{code}.doctor.txt").read_text())
    known = set(_of_the_pool(printed["balances"][0])) | set(_of_the_findings(printed["findings"]))
    untraced = [number for number in NUMBER.findall(NO_NUMBERS.sub("", told)) if number not in known]
    assert untraced == []
    for finding in printed["findings"]:
        for item in finding["evidence"]:
            if item["position"] and isinstance(item["value"], str) and item["name"] in ("anomaly", "story"):
                _holds(events[item["position"]], item["value"], finding["culprits"]["blocks"])


def _without_advice(text: str) -> str:
    """What is claimed; what is advised has figures of its own, of what would be."""
    kept = []
    advice = False
    for line in text.splitlines()[1:]:
        if line[:2] == "  " and line[2:3].strip():
            advice = line[2:].startswith(ADVICE)
        if not advice and not line.startswith("(exit code"):
            kept.append(line)
    return "\n".join(kept)


def _ways(value: float) -> Iterator[str]:
    """How a figure may be written."""
    for text in (f"{value:,}", f"{value:.1f}", f"{value:,.0f}", f"{int(value):,}", percent(value), duration(value)):
        yield text.split()[-2 if text.endswith((" %", " s", " min")) else 0]


def _of_the_pool(balance: dict[str, Any]) -> Iterator[str]:
    figures = [value for value in (*balance.values(), *balance["waiting_by_reason"].values()) if isinstance(value, int)]
    usable = balance["total"] - balance["reserved"]
    for figure in (*figures, *(figure / usable for figure in figures), balance["configuration"]["block_size"]):
        yield from _ways(figure)


def _of_the_findings(findings: list[dict[str, Any]]) -> Iterator[str]:
    yield str(len(findings))
    for finding in findings:
        named = [finding["culprits"]["requests"], finding["culprits"]["blocks"]]
        named += [effect["requests"] for effect in finding["effects"]]
        for names in named:
            yield from (str(len(names)), str(len(names) - 8), str(len(names) - 3), *map(str, names))
        for item in finding["evidence"]:
            if isinstance(item["value"], str):
                yield from NUMBER.findall(item["value"])
            else:
                yield from _ways(item["value"])
                yield str(item["value"] - 3)  # `r-1, r-2, r-3 and 7 more`


def _events(directory: Path) -> Iterator[tuple[str, Run]]:
    for frame in Recording(directory):
        if isinstance(frame, Batch):
            for index, event in enumerate(frame.events()):
                yield f"{frame.epoch}/{frame.sequence}/{index}", event


def _holds(event: Run, said: str, blocks: list[int]) -> None:
    """The event is of the kind that is told, about the block that is."""
    assert set(event.ids) & set(blocks), said
    about = re.search(r"block (\d+)", said)
    assert about is None or int(about[1]) in event.ids
    kind = Kind.ALLOCATED if "allocated" in said else Kind.RELEASED
    assert event.kind == kind, said
