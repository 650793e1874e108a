"""The doctor's report over all its targets: the JSON of `--format json`, described by report.schema.json."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import msgspec

from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.doctor.merged_findings import joined
from kvscope.monitor.doctor.observe import WATCH_S, Observation, look_back, observe
from kvscope.monitor.doctor.time_window import ALWAYS, Window
from kvscope.monitor.errors import BadTarget, CannotTell, Unreachable
from kvscope.monitor.findings import FindingReport, severity_at_least
from kvscope.monitor.json_names import schema_with_old_names
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.schema import SCHEMA_VERSION, EngineView
from kvscope.monitor.sources.exposition import shown
from kvscope.monitor.text import timestamp

NOTHING, FINDINGS, USAGE, CANNOT_TELL = 0, 1, 2, 3
FailOn = Literal["error", "warning", "never"]


class TargetReport(msgspec.Struct, frozen=True):
    """One target: its kind and whether it was readable. `error` is empty if it could."""

    target: str
    kind: str
    status: Literal["ok", "bad-target", "cannot-tell"]
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
        """Return 0 for nothing, 1 for findings at or above the bar, 2 for a usage error, 3 for cannot tell. Among
        several, 2 comes before 1 before 3.
        """
        statuses = {target.status for target in self.targets}
        if "bad-target" in statuses:
            return USAGE
        if fail_on != "never" and any(severity_at_least(finding.severity, fail_on) for finding in self.findings):
            return FINDINGS
        return CANNOT_TELL if "cannot-tell" in statuses else NOTHING


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
            observation = opened(target)
            try:
                if observation.undecided:
                    raise CannotTell(observation.undecided, observation.notes)
                return _reported(observation)
            finally:
                observation.close()
        except BadTarget as error:
            return TargetReport(name, "unknown", "bad-target", str(error), [], []), [], []
        except CannotTell as error:
            return TargetReport(name, "unknown", "cannot-tell", str(error), error.notes, []), [], []
        except Unreachable as error:
            return TargetReport(name, "unknown", "cannot-tell", str(error), [], []), [], []

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
    balance = engine.balance
    return BalanceReport(
        target=target,
        engine=engine.engine,
        at=engine.at,
        signal=engine.signal,
        status=engine.status,
        usage=None if engine.usage is None else round(engine.usage, 4),
        running_requests=engine.running,
        waiting_requests=engine.waiting,
        waiting_by_reason=engine.waiting_by_reason,
        total=balance.total if balance else None,
        free=balance.free if balance else None,
        cached_idle=balance.cached_idle if balance else None,
        running=balance.running if balance else None,
        waiting=balance.waiting if balance else None,
        finished=balance.finished if balance else None,
        reserved=balance.reserved if balance else None,
        unaccounted=balance.unaccounted if balance else None,
        unexplained_references=balance.unexplained_references if balance else None,
        step=engine.step,
        batches_lost=engine.batches_lost,
        uncertain_since=engine.uncertain_since,
        faults=engine.faults,
        configuration=engine.configuration,
    )


def schema() -> dict[str, Any]:
    """Return the JSON schema of a Report: the content of report.schema.json."""
    (described,), components = schema_with_old_names([Report], "#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "monitor doctor --format json",
        **described,
        "$defs": components,
    }
