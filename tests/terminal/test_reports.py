"""doctor on public incident reports, quoted in tests/data/reports with their address, and on what their lines say.

expected.json: `expect` are the codes that are right, `accept` those that are right in part. `kind` is `incident`,
`nothing` (KV memory is fine) or `cannot` (the text allows no verdict).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvscope.monitor.sources.log_patterns import PATTERNS, matched_lines
from kvscope.monitor.sources.log_patterns.pattern import LogPattern
from kvscope.monitor.terminal.cli import main

DATA = Path(__file__).parent.parent / "data"
CASES = sorted(path.parent for path in (DATA / "reports").glob("*/expected.json"))
SURE = ("likely", "confirmed")


def diagnosis(report: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]]]:
    code = main(["doctor", str(report), "--format", "json"])
    return code, json.loads(capsys.readouterr().out)["findings"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_report_gets_no_verdict_that_is_wrong(case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = json.loads((case / "expected.json").read_text())
    code, findings = diagnosis(case / "report.txt", capsys)
    right = {*expected["expect"], *expected["accept"]}
    alarms = {f["code"] for f in findings if f["verdict"] in SURE and f["severity"] != "info"}
    hypotheses = [f["code"] for f in findings if f["verdict"] not in SURE]
    assert alarms <= right
    if expected["kind"] == "nothing":
        assert code == 0 or {f["code"] for f in findings} <= right
    elif expected["kind"] == "cannot":
        assert code == 3 or findings
    else:
        named = {f["code"] for f in findings if f["verdict"] in SURE} | set(hypotheses[:2])
        assert named & right, (code, named)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_a_pattern_reads_its_sample(pattern: LogPattern) -> None:
    assert any(literal in pattern.sample for literal in pattern.literal.split("|"))
    assert pattern.name in {line.name for line in matched_lines(pattern.sample)}


@pytest.mark.parametrize("log", ["healthy-shared-prefix.log.gz", "kv-events.log.gz", "startup.log.gz"])
def test_healthy_logs_raise_no_alarm(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, findings = diagnosis(DATA / log, capsys)
    assert [f["code"] for f in findings if f["severity"] != "info"] == []
