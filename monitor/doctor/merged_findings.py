"""Merges the judgements of several targets about one engine: the highest-confidence verdict, with the others' evidence.

Two targets speak of one engine if its address and rank are the same (`NAME@HOST:PORT/RANK`, all names of this machine
being one) and its name is, or one of them does not know it: KV events do not, nor does a log that lacks its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from kvscope.monitor.findings import FindingReport
from kvscope.monitor.text import listed

UNNAMED: Final = ("engine", "vllm")
HERE: Final = ("localhost", "127.0.0.1", "0.0.0.0", "[::1]", "[::]")
MOST_CERTAIN_FIRST: Final = ("confirmed", "likely", "cannot-tell")


def joined(by_target: Sequence[tuple[str, Sequence[FindingReport]]]) -> list[FindingReport]:
    """Return the findings of all targets, in their order, each problem of an engine once.

    Where a target has several of a code (one for each request, for example), the others' evidence goes to its first.
    """
    left = [(target, finding) for target, findings in by_target for finding in findings]
    out: list[FindingReport] = []
    while left:
        target, finding = left.pop(0)
        others = [(t, f) for t, f in left if t != target and _same_problem(f, finding)]
        if not others:
            out.append(finding)
            continue
        reports = [(target, finding), *others]
        reports.sort(key=lambda report: MOST_CERTAIN_FIRST.index(report[1].verdict))
        base = reports[0][0]
        out.append(_one(reports))
        out += [f for t, f in left if t == base and _same_problem(f, finding) and f is not reports[0][1]]
        left = [(t, f) for t, f in left if not _same_problem(f, finding)]
    return out


def same_engine(one: str, other: str) -> bool:
    """Whether two ids are of one engine."""
    name, _, where = one.rpartition("@")
    other_name, _, other_where = other.rpartition("@")
    if _address(where) != _address(other_where):
        return False
    return name == other_name or name in UNNAMED or other_name in UNNAMED


def _address(where: str) -> tuple[str, str]:
    host, colon, port_and_rank = where.rpartition(":")
    return ("here" if colon and host in HERE else host), port_and_rank


def _same_problem(one: FindingReport, other: FindingReport) -> bool:
    return one.code == other.code and same_engine(one.engine, other.engine)


def _one(reports: Sequence[tuple[str, FindingReport]]) -> FindingReport:
    (_, most_certain), *others = reports
    seen = listed([f"{target} ({finding.verdict})" for target, finding in others])
    known = [finding.since for _, finding in reports if finding.since]
    return msgspec.structs.replace(
        most_certain,
        since=min(known, default=None),
        evidence=[item for _, finding in reports for item in finding.evidence],
        explanation=f"{most_certain.explanation} Also seen in {seen}.",
    )
