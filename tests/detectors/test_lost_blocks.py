"""Blocks and slots without an owner, as an engine's own audits report them (written/lost_blocks.py)."""

from __future__ import annotations

from datetime import UTC, datetime

from kvscope.monitor.findings import FindingReport
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.sources.engine_log import Log
from tests.detectors.scenes import value


def found(*lines: str) -> list[FindingReport]:
    """All findings above information, from a log of these lines."""
    watch = Pipeline()
    watch.feed(Log("sglang.log", datetime(2026, 11, 21, tzinfo=UTC)).records(lines))
    watch.settle()
    return [finding for finding in watch.findings() if finding.severity != "info"]


def test_a_request_slot_without_a_request_is_dated_by_the_line_of_the_audit() -> None:
    audit = "req_to_token_pool memory leak detected!available_size=3756, total_size=3757"
    (finding,) = found(f"[2026-11-20 00:37:19 TP0] UserWarning: {audit}")
    assert (finding.code, finding.verdict) == ("stuck.slots-exhausted", "likely")
    assert finding.since is not None
    assert finding.since.startswith("2026-11-20T00:37:19")
    assert value(finding, "missing_slots") == 1
