"""docs/codes.md states how sure each source can be of each code: no recorded incident shows more than it states."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvscope.monitor.detectors.detector import Signal
from kvscope.monitor.detectors.judgement import VERDICTS
from kvscope.monitor.detectors.registry import CATALOGUE
from kvscope.monitor.terminal.cli import main
from scripts.code_catalogue import FAMILIES, best_verdicts, codes_of_lines
from tests.terminal.by_source import INCIDENTS, SOURCES, in_the_docs

ROOT = Path(__file__).parent.parent
BY_COLUMN: dict[str, Signal] = dict(zip(SOURCES, ("stream", "metrics", "metrics", "log"), strict=True))


@cache
def written_codes() -> frozenset[str]:
    return codes_of_lines()


def is_within(code: str, signal: Signal, verdict: str) -> bool:
    """Whether the page says that the source can show the code, and as surely."""
    best = best_verdicts(code, written_codes()).get(signal)
    return best is not None and VERDICTS.index(best) >= [str(each) for each in VERDICTS].index(verdict)


def seen_incidents() -> Iterator[tuple[str, Signal, str]]:
    for column, signal in BY_COLUMN.items():
        for found in in_the_docs(column).values():
            yield from ((code, signal, verdict) for code, verdict in found.items())


def test_no_recorded_incident_is_surer_than_the_page() -> None:
    seen = list(seen_incidents())
    assert len(seen) >= len(INCIDENTS)
    assert [each for each in seen if not is_within(*each)] == []


def test_golden_verdicts_of_the_stream_are_within_the_page() -> None:
    texts = [path.read_text() for path in (ROOT / "tests" / "terminal" / "golden").glob("*doctor*")]
    seen = [
        found
        for text in texts
        for found in re.findall(r"\b([a-z]+\.[a-z-]+)\b.*\b(confirmed|likely|cannot-tell)\b", text)
    ]
    known = [(code, verdict) for code, verdict in seen if code in CATALOGUE]
    assert len({code for code, _ in known}) >= 6
    assert [each for each in known if not is_within(each[0], "stream", each[1])] == []


def test_no_public_report_is_surer_than_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    unstated, seen = [], 0
    for report in sorted((ROOT / "tests" / "data" / "reports").glob("*/report.txt")):
        main(["doctor", str(report), "--format", "json"])
        found = [(each["code"], each["verdict"]) for each in json.loads(capsys.readouterr().out)["findings"]]
        seen += len(found)
        unstated += [
            (report.parent.name, code, verdict)
            for code, verdict in found
            if not (is_within(code, "report", verdict) or is_within(code, "log", verdict))
        ]
    assert seen > 50
    assert unstated == []


def test_a_surer_verdict_than_stated_is_noticed() -> None:
    assert is_within("stuck.grammar", "stream", "likely")
    assert not is_within("stuck.grammar", "stream", "confirmed")
    assert not is_within("stuck.grammar", "metrics", "cannot-tell")


def test_every_family_has_a_heading() -> None:
    assert {code.partition(".")[0] for code in CATALOGUE} == FAMILIES.keys()


def test_no_code_that_a_vllm_has_shown_is_lab_only() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "probes").glob("test_vllm*.py"))
    assert '"leak.finished-held"' in tests
    assert [code for code, detector in CATALOGUE.items() if detector.lab_only and f'"{code}"' in tests] == []
