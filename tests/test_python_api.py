"""The public Python API: its names, what it opens, what its guide shows, and that it is typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

import kvscope
from kvscope.lab.recorded_pages import page, rows, served
from kvscope.lab.stepped_engine import Lab
from kvscope.lab.stepped_recordings import leaking_lab, recording_of
from kvscope.monitor.probes.publisher import Publisher
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.session import ROWS
from tests.detectors.scenes import ENGINE, finished_held
from tests.test_api import served as serve_pipeline

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "python-api.md"
DATA = Path(__file__).parent / "data"
LEAK = "leak.finished-held"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recording_of(leaking_lab(), tmp_path_factory.mktemp("leaking"))


@pytest.fixture
def session(recording: Path) -> Iterator[kvscope.Session]:
    with kvscope.open(str(recording)) as session:
        yield session


# -------------------------------------------------------------------- names


def test_the_public_names() -> None:
    """A change of this list is a change of the public API."""
    assert kvscope.__all__ == [
        "BadQuestion",
        "BadTarget",
        "BadTime",
        "CannotTell",
        "ContractError",
        "Detector",
        "EngineLedger",
        "Evidence",
        "Finding",
        "Judgement",
        "KvscopeError",
        "NotKnown",
        "Session",
        "Settings",
        "Source",
        "SourceOptions",
        "SourceStatus",
        "Threshold",
        "Unreachable",
        "open",
    ]
    for name in kvscope.__all__:
        assert getattr(kvscope, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = kvscope.Nothing


def test_importing_the_package_loads_nothing_else() -> None:
    """The probe imports it inside the engine's process."""
    code = "import sys; before = set(sys.modules); import kvscope; print(*set(sys.modules) - before)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    ours = {name for name in loaded.stdout.split() if name.startswith("kvscope")}
    assert ours == {"kvscope"}
    assert not {"msgspec", "httpx2", "pyarrow"} & set(loaded.stdout.split())


def test_every_exception_has_one_base() -> None:
    for name in kvscope.__all__:
        member = getattr(kvscope, name)
        if isinstance(member, type) and issubclass(member, BaseException):
            assert issubclass(member, kvscope.KvscopeError)
    assert issubclass(kvscope.NotKnown, LookupError)
    assert issubclass(kvscope.BadTime, kvscope.BadQuestion)


CONSUMER = """
import kvscope

def worst(target: str) -> kvscope.Finding | None:
    with kvscope.open(target, watch_s=1.0, thresholds=["leak.finished-held.grace_s=10"]) as session:
        then: kvscope.Session = session.at("14:02:11")
        request = then.request("r-1")
        blocks: list[int] = request.blocks
        chains: list[list[str]] = session.block(blocks[0]).ownership_chains
        evidence: list[kvscope.Evidence] = [each for finding in session.findings() for each in finding.evidence]
        return next(iter(session.findings()), None)
"""


@pytest.mark.slow  # it checks the whole package
def test_a_typed_program_that_uses_it_passes_mypy_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(CONSUMER)
    bad.write_text(CONSUMER.replace('session.at("14:02:11")', "session.at(14)").replace(".blocks\n", ".story\n"))
    options = ("--strict", "--follow-imports=silent", f"--cache-dir={tmp_path}")  # as for an installed package
    command = [sys.executable, "-m", "mypy", *options, str(good), str(bad)]
    subprocess.run(["sh", ROOT / "scripts" / "package_names.sh", tmp_path / "names"], check=True)
    environment = {**os.environ, "MYPYPATH": str(tmp_path / "names")}
    checked = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    errors = [line for line in checked.stdout.splitlines() if ": error:" in line]
    assert [line.partition(":")[0] for line in errors] == ["bad.py", "bad.py"], checked.stdout + checked.stderr


# -------------------------------------------------------------------- targets


def test_a_log_a_page_a_stream_and_a_service_are_opened_too(recording: Path) -> None:
    with kvscope.open(str(DATA / "never-freed.log.gz")) as log:
        assert [each.code for each in log.findings() if each.severity != "info"] == [LEAK]
        for asks in (log.requests, lambda: log.request("r-1")):
            with pytest.raises(kvscope.NotKnown, match="needs the event stream"):
                asks()
    scene = finished_held()
    scene.live(15)
    with serve_pipeline(scene.watch) as url, kvscope.open(url) as service:
        assert LEAK in {each.code for each in service.findings()}
        assert service.requests() == scene.watch.requests(ENGINE)
        events = service.events(limit=30)
        assert service.at(events[3].position).engines() == scene.watch.engines(events[3].position)


def test_a_metrics_page_is_opened() -> None:
    with served(page(rows("never-freed")[-1])) as server, kvscope.open(server.url, watch_s=0.5, timeout_s=1) as session:
        (engine,) = session.engines()
        assert (engine.signal, session.to_arrow("engines")["signal"].to_pylist()) == ("metrics", ["metrics"])
        assert session.to_arrow("events").num_rows == 0


def test_a_live_stream_is_opened(tmp_path: Path) -> None:
    lab = Lab(total=50, clock=time, pack=False)
    addresses = {"events": f"ipc://{tmp_path}/e", "replay": f"ipc://{tmp_path}/e-replay"}
    publisher = Publisher(lab.log, "lab@127.0.0.1:0/0", lab.vitals, **addresses, heartbeat_s=0.1)
    publisher.start()
    try:
        lab.arrive(30, name="alive")
        lab.step()
        with kvscope.open(publisher.events_endpoint, watch_s=0.3) as session:
            assert session.request("alive").request.state == "RUNNING"
            assert session.points()[-1].requests_running == 1
    finally:
        publisher.close()


# -------------------------------------------------------------------- sessions


def test_a_session_as_of_a_time_shows_what_was_so_then(session: kvscope.Session) -> None:
    (leak,) = [each for each in session.findings() if each.code == LEAK]
    events = session.events()
    begun = session.at(events[len(events) // 20].position)
    assert [each.code for each in begun.findings()] == []
    assert begun.engines()[0].at < session.engines()[0].at  # type: ignore[operator]
    assert begun.requests() != session.requests()
    firing = session.at(leak.since or "")
    assert [(each.code, each.state, each.resolved_at) for each in firing.findings()] == [(LEAK, "firing", None)]
    with pytest.raises(kvscope.BadTime):
        session.at("noon")
    with pytest.raises(kvscope.NotKnown):
        session.at("2001-01-01T00:00:00Z")


def test_events_are_all_there_once_and_in_order(session: kvscope.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = session.events()
    assert len(whole) > 100
    assert len({event.position for event in whole}) == len(whole)
    monkeypatch.setattr("kvscope.monitor.questions.session.PAGE", 7)
    assert session.events() == whole
    assert session.events(limit=23) == whole[-23:]
    assert session.events(kinds=["arrived"]) == [event for event in whole if event.kind == "arrived"]


def test_tables_have_a_row_for_each_answer(session: kvscope.Session) -> None:
    for name, rows_of in (("requests", session.requests()), ("points", session.points()), ("events", session.events())):
        table = session.to_arrow(name)  # type: ignore[arg-type]
        assert table.num_rows == len(rows_of) > 0
        assert set(table["engine"].to_pylist()) == {session.engines()[0].engine}
        assert table.column_names == ["engine", *ROWS[name].__struct_fields__]
    findings = session.to_arrow("findings")
    (row,) = [row for row in findings.to_pylist() if row["code"] == LEAK]
    (leak,) = [each for each in session.findings() if each.code == LEAK]
    assert row["culprits"]["requests"] == leak.culprits.requests
    assert [each["name"] for each in row["evidence"]] == [each.name for each in leak.evidence]
    assert findings.schema.field("since").type == pa.timestamp("ns", "UTC")
    assert row["since"].isoformat()[:19] == (leak.since or "")[:19]
    with pytest.raises(ValueError, match="'blocks' is not a table; there are: events, "):
        session.to_arrow("blocks")  # type: ignore[arg-type]


def test_of_several_engines_one_is_named() -> None:
    pipeline = Pipeline()
    for name in ("a@127.0.0.1:1/0", "b@127.0.0.1:2/0"):
        scene = finished_held()
        scene.live(15)
        pipeline.feed(msgspec.structs.replace(frame, engine=name) for frame in scene.lab.frames)
    with serve_pipeline(pipeline) as url, kvscope.open(url) as session:
        with pytest.raises(kvscope.NotKnown, match=r"2 engines. Name one: a@.*, b@"):
            session.requests()
        assert session.requests(engine="b@127.0.0.1:2/0") == pipeline.requests("b@127.0.0.1:2/0")
        assert {each.engine for each in session.findings("a@127.0.0.1:1/0")} == {"a@127.0.0.1:1/0"}
        assert len(set(session.to_arrow("requests")["engine"].to_pylist())) == 2


# -------------------------------------------------------------------- guide


def test_every_example_of_the_guide_runs(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recording").symlink_to(recording)
    (tmp_path / "vllm.log").write_bytes((DATA / "never-freed.log.gz").read_bytes())
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) >= 6
    scene = finished_held()
    scene.live(15)
    with serve_pipeline(scene.watch, token="s3cret") as url:
        names: dict[str, object] = {}
        for example in examples:
            exec(example.replace("http://127.0.0.1:8765", url), names)
    printed = capsys.readouterr().out
    assert LEAK in printed
    assert "there is no such file or directory" in printed


def test_the_guide_names_all_that_is_public() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert [name for name in kvscope.__all__ if not re.search(rf"\b{name}\b", text)] == []
