"""Every source goes wherever a target goes: a service, top and --watch follow what doctor reads.

Each output has data of each source, or says why not.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from kvscope.dashboards.web.links import PagePlace
from kvscope.dashboards.web.rendering import Pages
from kvscope.dashboards.web.view_registry import ANSWERS_OF
from kvscope.lab.kv_publisher import publishing, recorded
from kvscope.lab.recorded_pages import page, rows
from kvscope.lab.recorded_pages import served as pages_served
from kvscope.lab.stepped_recordings import leaking_lab, recording_of
from kvscope.monitor.base.errors import BadTarget, NotKnown
from kvscope.monitor.base.text import percent
from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.questions.availability import KINDS_OF_SOURCE, OUTPUTS, need_of, reason
from kvscope.monitor.questions.observe import observe
from kvscope.monitor.questions.query import Query
from kvscope.monitor.service.service import Service, ServiceConfig
from kvscope.monitor.sources.log_file import GrowingLog
from kvscope.monitor.sources.source import LOOK_BACK_S
from kvscope.monitor.terminal import top_text
from kvscope.monitor.terminal.cli import main
from kvscope.monitor.terminal.terminal import WIDTH
from kvscope.monitor.terminal.watch_mode import open_live
from tests.terminal.test_kv_events import going_on
from tests.waiting import PATIENCE_S, until
from tests.web.parts import Engine

LINES = gzip.decompress(Path("tests/data/never-freed.log.gz").read_bytes()).decode().splitlines(keepends=True)
LATEST = [index for index, line in enumerate(LINES) if "Avg prompt" in line][-5]


@contextmanager
def serving(*targets: str, **config: Path) -> Iterator[Service]:
    service = Service(ServiceConfig(targets=targets, **config))  # type: ignore[arg-type]
    service.start()
    try:
        yield service
    finally:
        service.stop()


def test_a_service_follows_a_log_and_kv_events_and_keeps_both(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("".join(LINES[:LATEST]))
    batches = recorded("kv-events")
    with publishing(tmp_path, batches) as publisher, going_on(publisher, batches):
        with serving(str(log), publisher.endpoint, data=tmp_path / "data") as service:
            until(lambda: len(service.watch.engines()) == 2)
            with log.open("a") as file:
                file.writelines(LINES[LATEST:])
            until(lambda: any(f.code == "leak.finished-held" for f in service.watch.findings("firing")))
            assert {view.kind for view in service.sources()} == {"log", "kv-events"}
            assert all(view.in_step and not view.error for view in service.sources())
        kept = [*(tmp_path / "data" / "history").iterdir()]
        assert len([path for path in kept if path.is_dir()]) == 2


def test_a_service_follows_a_prometheus_server(prometheus: str) -> None:
    with serving(f"prometheus+{prometheus}") as service:
        until(
            lambda: (
                service.sources()[0].kind == "prometheus" and (service.sources()[0].error or service.watch.engines())
            )
        )
        (source,) = service.sources()
        assert source.error == "" or "scrape targets" in source.error


def test_a_log_is_followed_at_a_terminal_and_when_it_is_rotated(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("".join(LINES[:LATEST]))
    with closing(open_live(str(log), Settings(), 5.0, "")) as live:
        steps = [view.at for view in live.query.engines()]
        log.rename(tmp_path / "server.log.1")
        log.write_text("".join(LINES[LATEST:]))
        until(lambda: live.listen(0.1) == "" and [view.at for view in live.query.engines()] != steps)


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    last = next(line for line in reversed(LINES) if "Avg prompt" in line)
    log.write_text("".join(LINES[:LATEST]))
    with closing(GrowingLog(log, LOOK_BACK_S)) as source:
        source.poll(0)
        with log.open("a") as file:
            file.write(last[:60])
            file.flush()
            assert source.poll(0) == []
            file.write(last[60:])
        assert [type(record) for record in source.poll(0)][:1] == [Sample]


@pytest.mark.parametrize("target", ["http://127.0.0.1:1", "tests/data/startup.log.gz"])
def test_what_a_service_cannot_read(target: str) -> None:
    with pytest.raises(BadTarget, match=r"cannot be read as a source|is over"):
        Service(ServiceConfig(targets=(target,)))


# -------------------------------------------------------------------- every source, every output


@contextmanager
def read(target: str) -> Iterator[Query]:
    """The answers about a target, as every command has them."""
    with closing(observe(target, Settings(), timeout_s=PATIENCE_S, watch_s=1.0)) as observed:
        yield observed.query


@contextmanager
def page_that_goes_on() -> Iterator[str]:
    """The address of a page whose figures change from scrape to scrape."""
    pages = cycle([page(row) for row in rows("healthy-shared-prefix")])
    with pages_served(lambda: next(pages)) as server:
        yield server.url


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A target of each source, but for a Prometheus server."""
    batches = recorded("kv-events")
    log = tmp_path / "server.log"
    log.write_text("".join(LINES[:LATEST]))
    with ExitStack() as stack:
        (tmp_path / "kv").mkdir()
        publisher = stack.enter_context(publishing(tmp_path / "kv", batches))
        stack.enter_context(going_on(publisher, batches))
        engine = stack.enter_context(Engine(tmp_path, total=101))
        until(lambda: engine.lab.scheduler.running)  # the probe has published, and nobody has read it
        yield {
            "event stream": engine.events,
            "probe, read late": engine.events,
            "recording": str(recording_of(leaking_lab(), tmp_path / "recording")),
            "metrics page": stack.enter_context(page_that_goes_on()),
            "log": str(log),
            "KV events": publisher.endpoint,
        }


def asked(query: Query, output: str, engine: str) -> Any:
    """The answer to a question about the engine, about what is there."""
    match output:
        case "engines":
            return query.engines("", engine)
        case "findings":
            return [*query.findings(None, engine), *query.alert_state().thresholds]
        case "request" | "find_request":
            streamed = query.engines("", engine)[0].signal == "stream"
            id = query.requests(engine)[0].id if streamed else "1"
            return query.request(engine, id) if output == "request" else query.find_request(id, engine)
        case "block":
            return query.block(engine, 1)
        case "block_colours":
            return query.block_colours(engine, "owner")
        case _:
            return getattr(query, output)(engine)


def is_empty(answer: Any) -> bool:
    """Whether nothing is in an answer that would be drawn."""
    return answer in ([], None) or getattr(answer, "total", 1) == 0 or getattr(answer, "requests", 1) == []


def walk(source: str, target: str) -> None:
    """Each question and each view has data of this source or says, in the table's words, why it has none."""
    seen = KINDS_OF_SOURCE[source]
    with read(target) as query:
        engine = query.engines()[0].engine
        for output in OUTPUTS:
            if output == "trace" or (output == "memory" and not reason(output, seen)):
                continue  # a file is no question; the figures of memory are not in every log and stream
            why = reason(output, seen)
            if why:
                with pytest.raises(NotKnown) as told:
                    asked(query, output, engine)
                assert str(told.value) == f"{engine}: {why}"
            else:
                assert not is_empty(asked(query, output, engine)), output
        for path, ((question, _), *_) in ANSWERS_OF.items():
            why = reason(question, seen) if question in OUTPUTS else ""
            if why and path == "search":
                why = need_of(question)  # it is of every engine
            place = PagePlace(path, engine, id="1", more=(("q", "1"),) if path == "search" else ())
            shown = json.dumps(asyncio.run(Pages(query).page(place)).sections, ensure_ascii=False)
            if why:
                assert why in shown, path
            elif path != "memory":
                assert " needs the " not in shown, path


@pytest.mark.parametrize("source", [source for source in KINDS_OF_SOURCE if source != "Prometheus"])
def test_each_output_has_data_of_a_source_or_says_why_not(source: str, sources: dict[str, str]) -> None:
    walk(source, sources[source])


def test_each_output_has_data_of_prometheus_or_says_why_not(prometheus: str) -> None:
    walk("Prometheus", f"prometheus+{prometheus}")


@pytest.mark.parametrize("source", [source for source in KINDS_OF_SOURCE if source != "Prometheus"])
def test_doctor_and_top_state_the_usage_of_a_source_or_that_it_has_none(
    source: str, sources: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", sources[source]]) in (0, 1)
    report = capsys.readouterr().out
    with read(sources[source]) as query:
        (view,) = query.engines()
        shown = str(top_text.engines([view], view.engine))
    assert f"ENGINE {view.engine}"[:WIDTH] in report
    assert view.engine in shown
    has_owners, has_usage = KINDS_OF_SOURCE[source] == "stream", source != "KV events"
    assert ("UNACCOUNTED" in report) == has_owners == ("not exposed by this target" not in report)
    assert (re.search(r"usage +not exposed", report) is None) == has_usage == ("neither its usage" not in shown)
    assert not has_usage or f"{percent(view.usage or 0.0)} in use" in shown


@pytest.mark.parametrize("source", ["metrics page", "log", "KV events"])
def test_no_file_of_events_is_made_where_there_are_none(
    source: str, sources: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", sources[source], str(tmp_path / "trace")]) in (2, 3)
    assert need_of("trace") in capsys.readouterr().err
