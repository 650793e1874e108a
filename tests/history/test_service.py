"""A service and its history: a recording shown alone, what was found before a restart, two services in one place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvscope.dashboards.web.links import PagePlace
from kvscope.dashboards.web.rendering import Pages
from kvscope.monitor.base.text import timestamp
from kvscope.monitor.history.findings_log import FindingsLog
from kvscope.monitor.history.history import History, Recordings
from kvscope.monitor.history.segment_files import directory_of
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service.service import Service, ServiceConfig
from kvscope.monitor.service.source_reader import SourceReader
from kvscope.monitor.sources.recording import Recording
from kvscope.monitor.terminal.cli import main
from tests.detectors.scenes import ENGINE, finished_held
from tests.history.recorded import write
from tests.waiting import until


def test_a_recording_is_shown_to_its_end_and_at_any_moment(tmp_path: Path) -> None:
    scene = finished_held()
    scene.live(15)
    frames = list(scene.lab.frames)
    write(tmp_path, frames)
    service = Service(ServiceConfig(events=(), recordings=(tmp_path,)))
    service.start()
    try:
        until(lambda: service.sources()[0].in_step)
    finally:
        service.stop()
    (source,) = service.sources()
    assert (source.target, source.engine, source.error) == (str(tmp_path), ENGINE, "")
    read = Pipeline(history=History(tmp_path))
    read.feed(Recording(tmp_path))
    read.settle()
    assert service.watch.findings() == read.findings()
    assert service.watch.engines() == read.engines()
    assert {finding.code for finding in read.findings()} >= {"leak.finished-held"}
    # Nobody is told of what is over.
    assert service.watch.take_transitions() == []
    assert service.watch.take_ended() == []
    past = timestamp(frames[len(frames) // 2].wall_ns)
    assert past is not None
    (then,) = service.watch.engines(past)
    assert then.at == past


def test_a_recording_is_in_step_once_detectors_have_seen_its_end(tmp_path: Path) -> None:
    scene = finished_held()
    scene.live(15)
    write(tmp_path, scene.lab.frames)
    reader = SourceReader(Recording(tmp_path), Pipeline())
    turns = []
    while reader._turn() is not None:
        turns.append(reader.view().in_step)
    assert not any(turns)
    assert reader.view().in_step
    reader.stop()


@pytest.mark.parametrize("names", [("monday", "friday"), ("monday/run", "friday/run")])
def test_two_recordings_of_one_engine_are_shown_together(tmp_path: Path, names: tuple[str, str]) -> None:
    alone = {}
    for name, living_s in zip(names, (15, 2), strict=True):
        scene = finished_held()
        scene.live(living_s)
        write(tmp_path / name, scene.lab.frames)
        alone[name] = Pipeline(history=History(tmp_path / name))
        alone[name].feed(Recording(tmp_path / name))
        alone[name].settle()
    service = Service(ServiceConfig(events=(), recordings=tuple(tmp_path / name for name in names)))
    service.start()
    try:
        until(lambda: all(source.in_step for source in service.sources()))
    finally:
        service.stop()
    called = dict(zip(names, (source.engine for source in service.sources()), strict=True))
    assert len(set(called.values())) == 2
    for name, engine in called.items():
        assert engine.endswith(f"{Path(name).name}: {ENGINE}")
        (view,) = [view for view in service.watch.engines() if view.engine == engine]
        (own,) = alone[name].engines()
        assert (view.balance, view.at) == (own.balance, own.at)
        codes = [finding.code for finding in service.watch.findings(engine=engine)]
        assert codes == [finding.code for finding in alone[name].findings()]
        then = service.watch.history(engine).first or ""
        assert service.watch.block_map(engine, then).states == alone[name].block_map(ENGINE, then).states
    # Each has a past of its own on disk too.
    from_disk = Pipeline(history=Recordings([tmp_path / name for name in names]))
    for name, engine in called.items():
        assert from_disk.requests(engine) == Pipeline(history=History(tmp_path / name)).requests(ENGINE)


def test_findings_outlast_the_service(tmp_path: Path) -> None:
    scene = finished_held()
    scene.live(15)
    watch = Pipeline()
    watch.feed(scene.lab.frames)
    transitions = watch.take_transitions()
    log = FindingsLog(tmp_path)
    log.append(transitions[:-1])
    with log.path.open("ab") as file:
        file.write(b'{"to":"firing","at')  # a crash
    log.append(transitions[-1:])
    assert [(reported.id, reported.to, reported.at_ns) for reported in FindingsLog(tmp_path).read()] == [
        (transition.finding.id, transition.to, transition.at_ns) for transition in transitions
    ]
    (still,) = [finding for finding in watch.lifecycle.firing() if finding.judgement.code == "leak.finished-held"]
    assert FindingsLog(tmp_path).open()[still.place] == still.first_seen_ns
    # After a restart it is the same finding, if it is judged again.
    again = Pipeline()
    again.lifecycle.remember(log.open(), still.last_seen_ns + 1)
    again.feed(scene.lab.frames)
    assert still.id in {finding.id for finding in again.lifecycle.firing()}
    log.drop(days=0)
    assert log.read() == []


def test_findings_that_a_full_disk_refused_are_written_later(tmp_path: Path) -> None:
    scene = finished_held()
    scene.live(15)
    watch = Pipeline()
    watch.feed(scene.lab.frames)
    transitions = watch.take_transitions()
    assert transitions
    log = FindingsLog(tmp_path)
    log.path.symlink_to("/dev/full")
    log.append([])
    for refused in (transitions, []):
        with pytest.raises(OSError, match="No space left"):
            log.append(refused)
    log.path.unlink()
    log.append([])
    assert [reported.id for reported in FindingsLog(tmp_path).read()] == [
        transition.finding.id for transition in transitions
    ]
    before = log.path.read_bytes()
    log.append([])
    assert log.path.read_bytes() == before, "each is written once"


def test_what_was_resolved_is_known_after_a_restart(tmp_path: Path) -> None:
    scene = finished_held()
    scene.live(15)
    watch = Pipeline()
    watch.feed(scene.lab.frames)
    (firing,) = watch.lifecycle.firing()
    ended = watch.lifecycle.update(ENGINE, firing.last_seen_ns + 10_000_000_000, [])
    FindingsLog(tmp_path).append([*watch.take_transitions(), *ended])
    resolved = watch.lifecycle.resolved()
    assert resolved
    again = Pipeline()
    again.lifecycle.recall(FindingsLog(tmp_path).resolved())
    for one, other in zip(again.lifecycle.resolved(), resolved, strict=True):
        assert one.report() == other.report()


def test_two_services_do_not_share_a_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Service(ServiceConfig(events=(), data=tmp_path))
    try:
        assert main(["serve", "--data", str(tmp_path), "--port", "0"]) == 2
        assert "another service keeps its history" in capsys.readouterr().err
    finally:
        first.stop()


def test_a_recording_is_shown_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("--events", "tcp://127.0.0.1:5757"), ("--data", str(tmp_path))):
        assert main(["serve", "--recording", str(tmp_path), flag, value]) == 2
        assert "alone" in capsys.readouterr().err
    assert main(["serve", "--recording", str(tmp_path / "nothing")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    assert main(["serve", "--recording", str(tmp_path)]) == 2
    assert "holds no recording" in capsys.readouterr().err
    assert main(["serve", "--data", str(tmp_path), "--keep-bytes", "2G", "--host", "10.0.0.1"]) == 2
    (tmp_path / "file").touch()
    for alone, needed in (("--keep-days", "--data"), ("--keep-bytes", "--data"), ("--otlp-sample", "--otlp")):
        assert main(["serve", alone, "1"]) == 2
        assert needed in capsys.readouterr().err
    capsys.readouterr()
    assert main(["serve", "--data", str(tmp_path / "file"), "--port", "0"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    for flag, value in (("--keep-bytes", "much"), ("--keep-days", "-1"), ("--keep-days", "long"), ("--port", "99999")):
        with pytest.raises(SystemExit, match="2"):
            main(["serve", flag, value])
        assert f"{value} is" in capsys.readouterr().err


def test_engines_that_are_gone_are_known_as_they_were_last(tmp_path: Path) -> None:
    """A service that begins long after them hears none, and its web app shows what they were."""
    scene = finished_held()
    scene.live(15)
    write(directory_of(tmp_path, ENGINE), scene.lab.frames)
    watch = Pipeline(history=History(tmp_path))
    assert watch.engines() == []
    (gone,) = watch.past_engines()
    read = Pipeline()
    read.feed(scene.lab.frames)
    (last,) = read.engines()
    assert (gone.engine, gone.status, gone.balance) == (ENGINE, "gone", last.balance)
    place = PagePlace("requests", engine=ENGINE)
    page = asyncio.run(Pages(watch).page(place))
    assert page.notices["engine"] == ENGINE
    shown = "".join(page.sections.values())
    assert all(view.id in shown for view in watch.requests(ENGINE))
    assert watch.requests(ENGINE)
    overview = asyncio.run(Pages(watch).page(PagePlace("")))
    assert "No engine is received" in overview.sections["main head"]
    # One that is heard again is not gone.
    watch.feed(scene.lab.frames)
    assert watch.past_engines() == []
    assert [view.engine for view in watch.engines()] == [ENGINE]
