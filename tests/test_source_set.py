"""Sources are added to and removed from a running service; no finding fires or is resolved by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvscope.lab.recorded_pages import page, rows, served
from kvscope.monitor.base.errors import BadTarget
from kvscope.monitor.detectors.findings import LOOK_AGAIN_S, Findings
from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.detectors.registry import parse_settings
from kvscope.monitor.fleet.open_findings import LeftBehind
from kvscope.monitor.history.findings_log import FindingsLog
from kvscope.monitor.outputs.alerting.alerting import AlertsConfig
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service import source_set
from kvscope.monitor.service.service import Service, ServiceConfig
from kvscope.monitor.service.source_reader import SourceReader
from kvscope.monitor.service.source_set import SharedEngines, SourceSet, WantedSource
from kvscope.monitor.sources.source import Source, SourceStatus
from kvscope.monitor.sources.targets import TargetKind
from tests.finding_transitions import ENGINE as JUDGED_ENGINE
from tests.probes.published import ENGINE
from tests.test_service import process, receiver
from tests.waiting import until

LEAK = "leak.finished-held"


@contextmanager
def leaking(path: Path) -> Iterator[WantedSource]:
    """An engine that leaks blocks and works on, in a process of its own."""
    events = f"ipc://{path}/events"
    with process("kvscope.lab.stepped_process", events, f"{events}-replay", "", "4", f"{LEAK}:limit=3") as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        yield WantedSource(events, TargetKind.STREAM)


@contextmanager
def running(config: ServiceConfig) -> Iterator[Service]:
    service = Service(config)
    service.start()
    try:
        yield service
    finally:
        service.stop()


def firing(service: Service) -> dict[str, str]:
    return {found.code: found.id for found in service.watch.findings("firing")}


@pytest.mark.slow
def test_a_removed_engine_leaves_and_what_was_found_of_it_goes_on_when_it_is_back(tmp_path: Path) -> None:
    log = FindingsLog(tmp_path / "data" / "history")
    settings = parse_settings([f"{LEAK}.grace_s=1"])
    with receiver() as (url, received), leaking(tmp_path) as wanted:
        alerts = AlertsConfig((url,), allow_private=True, path=tmp_path / "data" / "alerts.sqlite")
        config = ServiceConfig(settings=settings, data=tmp_path / "data", alerts=alerts)
        with running(config) as service:
            service.readers.add(wanted, "a test")
            until(lambda: LEAK in firing(service) and received, "a finding and its alert")
            found = firing(service)[LEAK]
            service.readers.remove([wanted], "a test")
            assert service.watch.engines() == []
            assert service.sources() == []
            assert not any(thread.name.startswith("kvscope-read") for thread in threading.enumerate())
            reported = log.read()
            time.sleep(4)  # longer than it takes until what is not judged any more is resolved
            assert log.read() == reported
            assert len(received) == 1
            # Its past and its finding can be read, and fire no more.
            assert firing(service) == {}
            assert service.watch.finding(found).finding.code == LEAK
            assert [view.engine for view in service.watch.past_engines()] == [ENGINE]
            assert service.watch.requests(ENGINE, at=service.watch.past_engines()[0].at or "")
            (change, *_) = service.readers.changes()
            assert (change.change, change.origin, change.engines) == ("removed", "a test", [ENGINE])

            service.readers.add(wanted, "a test")
            until(lambda: firing(service).get(LEAK) == found, "the same finding")
            until(lambda: len(log.read()) > len(reported), "it was seen again")
            new = {(each.to, each.id) for each in log.read()[len(reported) :]}
            assert ("firing", found) in new
            assert new <= {(each.to, each.id) for each in reported}
            assert len(received) == 1
            assert service.readers.counts() == {"added": 2, "removed": 1}


@pytest.mark.slow
def test_an_engine_that_another_agent_takes_over_is_not_told_to_be_resolved(tmp_path: Path) -> None:
    with receiver() as (url, received), leaking(tmp_path) as wanted:
        alerts = AlertsConfig((url,), allow_private=True, look_again_s=1.0)
        with running(ServiceConfig(settings=parse_settings([f"{LEAK}.grace_s=1"]), alerts=alerts)) as service:
            service.shared = SharedEngines(service.watch, service.readers)
            service.shared.add(wanted, "a test")
            service.shared.begin(wanted.target, {})
            until(lambda: received, "an alert")
            service.shared.end(wanted.target)
            time.sleep(3)  # alerts of engines that nothing watches would have ended by now
            assert service.alerts is not None
            assert service.alerts.view().open == []
            assert len(received) == 1


def test_what_no_history_has_of_an_engine_begins_where_another_agent_left_it(tmp_path: Path) -> None:
    target = f"ipc://{tmp_path}/nobody"
    with running(ServiceConfig()) as service:
        shared = SharedEngines(service.watch, service.readers)
        for left, expected in (((7, 41), 42), ((6, 41), 0), ((8, 41), -1), ((0, -1), -1)):
            shared.begin(target, {ENGINE: LeftBehind([], *left)})
            assert [shared.unkept(ENGINE, 7) for _ in range(2)] == [expected, -1]


def test_an_engine_that_another_source_has_stays(tmp_path: Path) -> None:
    with leaking(tmp_path) as wanted, running(ServiceConfig()) as service:
        service.readers.add(wanted, "one")
        service.readers.add(wanted, "other")
        until(service.watch.engines, "the engine")
        service.readers.remove([wanted], "one")
        assert [view.target for view in service.sources()] == [wanted.target]
        assert service.watch.engines()
        service.readers.remove([wanted], "nothing that wants it")
        assert service.watch.engines()
        service.readers.remove([wanted], "other")
        assert service.watch.engines() == []


def test_what_cannot_be_read_is_refused_and_changes_nothing() -> None:
    with served(page(rows("never-freed")[30])) as engine, running(ServiceConfig(metrics=(engine.url,))) as service:
        until(service.watch.engines, "the engine")
        with pytest.raises(BadTarget, match="no source reads this scheme"):
            service.readers.add(WantedSource("gopher://somewhere"), "a test")
        assert [view.target for view in service.sources()] == [engine.url]
        assert service.readers.changes() == []


class Hanging(Source):
    """Polls return when `over` is set."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.polled = threading.Event()
        self.closed = threading.Event()

    def poll(self, timeout_s: float = 0.1) -> list[object]:  # type: ignore[override]
        self.polled.set()
        self.over.wait()
        raise RuntimeError("it was removed long ago")

    def status(self) -> SourceStatus:
        return SourceStatus(target="hanging", kind="test", engines=("an-engine",))

    def close(self) -> None:
        self.closed.set()


def test_a_source_that_hangs_is_left_behind_and_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_set, "LEAVE_WITHIN_S", 0.1)
    watch, source = Pipeline(), Hanging()
    readers = SourceSet(watch, lambda _wanted: source, lambda each: SourceReader(each, watch))
    readers.start()
    wanted = WantedSource("hanging")
    readers.add(wanted, "a test")
    (reader,) = readers
    assert source.polled.wait(10)
    readers.remove([wanted], "a test")
    assert list(readers) == []
    assert reader.thread.is_running
    source.over.set()
    assert source.closed.wait(10)
    reader.thread.join()
    assert watch.supervisor.failures() == ()
    assert watch.supervisor.late(0) == {}
    assert watch.supervisor.totals() == {}


# -------------------------------------------------------------------- findings that were set aside

S = 1_000_000_000
PATIENCE_NS = round(LOOK_AGAIN_S * S)
Judged = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def judged() -> tuple[Findings, Judged]:
    findings = Findings()

    def at(now_ns: int, *, seen: bool, epoch_ns: int = 0) -> list[tuple[str, str]]:
        judgements = [Judgement(LEAK, JUDGED_ENGINE, "confirmed", explanation="because")] if seen else []
        return [(each.to, each.finding.id) for each in findings.update(JUDGED_ENGINE, now_ns, judgements, epoch_ns)]

    return findings, at


def test_a_problem_that_ended_while_nothing_watched_is_resolved_after_a_patience(
    judged: tuple[Findings, Judged],
) -> None:
    findings, at = judged
    ((_, found),) = at(100 * S, seen=True)
    findings.set_aside(JUDGED_ENGINE, 101 * S)
    assert findings.firing() == []
    assert at(150 * S, seen=False) == []
    assert at(150 * S + PATIENCE_NS - 1, seen=False) == []
    assert at(150 * S + PATIENCE_NS, seen=False) == [("resolved", found)]
    assert findings.resolved()[0].resolved_ns == 100 * S


def test_after_long_it_is_another_problem(judged: tuple[Findings, Judged]) -> None:
    findings, at = judged
    ((_, found),) = at(100 * S, seen=True)
    findings.set_aside(JUDGED_ENGINE, 101 * S)
    ((to, other),) = at(101 * S + PATIENCE_NS, seen=True)
    assert to == "firing"
    assert other != found


def test_an_engine_that_was_started_anew_meanwhile_has_another_problem(judged: tuple[Findings, Judged]) -> None:
    findings, at = judged
    ((_, found),) = at(100 * S, seen=True)
    findings.set_aside(JUDGED_ENGINE, 101 * S)
    ended, fired = at(150 * S, seen=True, epoch_ns=120 * S)
    assert ended == ("resolved", found)
    assert fired[0] == "firing"
    assert fired[1] != found
