"""The doctor's report over all its targets: the JSON of `--format json`, described by report.schema.json."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Final, Literal

import msgspec

from ..base.errors import BadTarget, CannotTell, Unreachable
from ..base.http_url import shown
from ..base.text import listed, timestamp
from ..detectors.detector import Settings
from ..detectors.findings import FindingReport, severity_at_least
from ..ledger.balance import Balance
from ..planning.plan_types import json_schema
from ..questions.observe import ALWAYS, WATCH_S, Observation, Window, look_back, observe
from ..questions.pipeline import Pipeline
from ..questions.schema import SCHEMA_VERSION, EngineView

NOTHING, FINDINGS, USAGE, CANNOT_TELL = 0, 1, 2, 3
TargetStatus = Literal["ok", "bad-target", "cannot-tell"]
FailOn = Literal["error", "warning", "never"]


class TargetReport(msgspec.Struct, frozen=True):
    """One target: its kind and whether it was readable. `error` is empty if it could."""

    target: str
    kind: str
    status: TargetStatus
    error: str
    notes: list[str]
    engines: list[str]


class BalanceReport(msgspec.Struct, frozen=True):
    """One engine's pool, in blocks, with null for values that the target does not expose. `usage` is 0 to 1."""

    target: str
    engine: str
    at: str | None
    signal: str
    status: str
    usage: float | None
    running_requests: int | None
    waiting_requests: int | None
    waiting_by_reason: dict[str, int]
    total: int | None
    free: int | None
    cached_idle: int | None
    running: int | None
    waiting: int | None
    finished: int | None
    reserved: int | None
    unaccounted: int | None
    unexplained_references: int | None
    step: int | None
    batches_lost: int
    uncertain_since: str | None
    faults: list[str]
    configuration: dict[str, Any]


class Report(msgspec.Struct, frozen=True):
    """All of it."""

    schema_version: str
    generated_at: str | None
    targets: list[TargetReport]
    balances: list[BalanceReport]
    findings: list[FindingReport]

    def exit_code(self, fail_on: FailOn) -> int:
        """Return 0 for nothing, 1 for findings at or above the bar, 2 for a usage error, 3 for cannot tell or for
        hypotheses. Among several, 2 comes before 1 before 3.
        """
        statuses = {target.status for target in self.targets}
        if "bad-target" in statuses:
            return USAGE
        if fail_on != "never" and any(severity_at_least(finding.severity, fail_on) for finding in self.findings):
            return FINDINGS
        return CANNOT_TELL if "cannot-tell" in statuses or self.hypotheses() else NOTHING

    def hypotheses(self) -> list[FindingReport]:
        """Return what prose alone suggests, the most probable first."""
        return [finding for finding in self.findings if finding.severity == "none"]

    def measured(self) -> list[FindingReport]:
        """Return the findings that figures, events or lines show."""
        return [finding for finding in self.findings if finding.severity != "none"]


def examine(
    targets: Sequence[str],
    settings: Settings,
    *,
    timeout_s: float = 10.0,
    watch_s: float = WATCH_S,
    token: str = "",
    prometheus: Sequence[str] = (),
    window: Window = ALWAYS,
) -> Report:
    """Examine all targets at once, and the history of the Prometheus servers, in the window where there is a past."""
    streams = Pipeline(settings)

    def open_target(target: str) -> Observation:
        return observe(target, settings, streams, timeout_s=timeout_s, watch_s=watch_s, token=token, window=window)

    def open_past(url: str) -> Observation:
        return look_back(url, window, settings, timeout_s=timeout_s)

    def look(
        target: str, opened: Callable[[str], Observation]
    ) -> tuple[TargetReport, list[BalanceReport], list[FindingReport]]:
        name = shown(target)
        try:
            with closing(opened(target)) as observation:
                if observation.undecided:
                    raise CannotTell(observation.undecided, observation.notes)
                return _reported(observation)
        except (BadTarget, CannotTell, Unreachable) as error:
            status: TargetStatus = "bad-target" if isinstance(error, BadTarget) else "cannot-tell"
            notes = error.notes if isinstance(error, CannotTell) else []
            return TargetReport(name, "unknown", status, str(error), notes, []), [], []

    wanted = [*((target, open_target) for target in targets), *((url, open_past) for url in prometheus)]
    with ThreadPoolExecutor(max_workers=min(8, len(wanted))) as pool:
        looked_at = list(pool.map(look, *zip(*wanted, strict=True)))
    return Report(
        schema_version=SCHEMA_VERSION,
        generated_at=timestamp(time.time_ns()),
        targets=[target for target, _, _ in looked_at],
        balances=[balance for _, balances, _ in looked_at for balance in balances],
        findings=joined([(target.target, findings) for target, _, findings in looked_at]),
    )


def _reported(observation: Observation) -> tuple[TargetReport, list[BalanceReport], list[FindingReport]]:
    engines = observation.engines()
    findings = observation.findings()
    target = TargetReport(
        observation.target, observation.kind, "ok", "", observation.notes, [engine.engine for engine in engines]
    )
    return target, [_balance_report(observation.target, engine) for engine in engines], findings


def _balance_report(target: str, engine: EngineView) -> BalanceReport:
    holders: dict[str, int | None] = dict.fromkeys(Balance.__struct_fields__)
    if engine.balance is not None:
        holders = msgspec.structs.asdict(engine.balance)
    return BalanceReport(
        target=target,
        engine=engine.engine,
        at=engine.at,
        signal=engine.signal,
        status=engine.status,
        usage=engine.usage,
        running_requests=engine.running,
        waiting_requests=engine.waiting,
        waiting_by_reason=engine.waiting_by_reason,
        **holders,
        step=engine.step,
        batches_lost=engine.batches_lost,
        uncertain_since=engine.uncertain_since,
        faults=engine.faults,
        configuration=engine.configuration,
    )


def schema() -> dict[str, Any]:
    """Return the JSON schema of a Report: the content of report.schema.json."""
    return json_schema(Report, "monitor doctor --format json")


# -------------------------------------------------------------------- several targets about one engine


UNNAMED: Final = ("engine", "vllm")
HERE: Final = ("localhost", "127.0.0.1", "0.0.0.0", "[::1]", "[::]")
MOST_CERTAIN_FIRST: Final = ("confirmed", "likely", "cannot-tell")


def joined(by_target: Sequence[tuple[str, Sequence[FindingReport]]]) -> list[FindingReport]:
    """Return the findings of all targets, in their order, each problem of an engine once: with the most certain
    verdict, and the others' evidence.

    Two targets speak of one engine if its address and rank are the same (`NAME@HOST:PORT/RANK`, all names of this
    machine being one) and its name is, or one of them does not know it: KV events do not, nor does a log that lacks its
    beginning. Where a target has several of a code (one for each request, for example), the others' evidence goes to
    its first.
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
