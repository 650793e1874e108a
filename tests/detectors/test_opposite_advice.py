"""Findings of one engine never advise opposite values of one setting.

The runs of the lab look for it at every moment (kvscope.lab.lab_run). Here are the recordings and reports of
tests/data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvscope.lab.opposite_advice import advised_values, opposite_advice
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.terminal.cli import main

DATA = Path(__file__).parent.parent / "data"


def targets() -> Iterator[list[str]]:
    """Yield each report, each recording alone, and what was recorded together."""
    yield from ([str(path)] for path in sorted(DATA.glob("reports/*/report.txt")))
    recorded = [path for path in sorted(DATA.iterdir()) if path.is_file() and path.name != "README.md"]
    yield from ([str(path)] for path in recorded)
    for name in sorted({path.name.partition(".")[0] for path in recorded}):
        together = [str(path) for path in recorded if path.name.partition(".")[0] == name]
        if len(together) > 1:
            yield together


def finding(code: str, *change: str, engine: str = "a") -> FindingReport:
    fields = {field: [] for field in ("evidence", "do_now", "wont_help")}
    texts = dict.fromkeys(("id", "title", "position", "explanation", "missing", "runbook"), "")
    return msgspec.convert(
        {
            **fields,
            **texts,
            "code": code,
            "severity": "warning",
            "verdict": "likely",
            "state": "firing",
            "engine": engine,
            "since": None,
            "resolved_at": None,
            "culprits": {"requests": [], "blocks": []},
            "change": list(change),
        },
        FindingReport,
    )


@pytest.mark.slow
def test_no_report_or_recording_gets_opposite_advice(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, list[str]] = {}
    advised = 0
    for target in targets():
        main(["doctor", *target, "--format", "json"])
        findings = msgspec.convert(json.loads(capsys.readouterr().out)["findings"], list[FindingReport])
        advised += sum(1 for each in findings for value in advised_values(each) if value.direction)
        if opposites := opposite_advice(findings):
            found[" ".join(Path(path).parent.name + "/" + Path(path).name for path in target)] = opposites
    assert found == {}
    assert advised > 50


def test_opposites_are_found() -> None:
    raises = finding("a.b", "Enlarge the pool: a higher --gpu-memory-utilization.")
    lowers = finding("c.d", "Use another device, or lower --gpu-memory-utilization to 0.8.")
    assert len(opposite_advice([raises, lowers])) == 1
    assert opposite_advice([raises, finding("c.d", *lowers.change, engine="b")]) == []
    assert opposite_advice([raises, finding("c.d", "If others need room, lower --gpu-memory-utilization.")]) == []


def test_two_sizes_of_one_setting_are_opposites() -> None:
    sizes = [finding(code, f"Start with --kv-cache-memory-bytes {size}.") for code, size in (("a.b", 1), ("c.d", 2))]
    assert len(opposite_advice(sizes)) == 1
    assert opposite_advice([sizes[0], sizes[0]]) == []
