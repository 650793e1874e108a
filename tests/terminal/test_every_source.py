"""Every source goes wherever a target goes: a service, top and --watch follow what doctor reads."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvscope.lab.kv_publisher import publishing, recorded
from kvscope.monitor.base.errors import BadTarget
from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.service.service import Service, ServiceConfig
from kvscope.monitor.sources.log_file import GrowingLog
from kvscope.monitor.sources.source import LOOK_BACK_S
from kvscope.monitor.terminal.watch_mode import open_live
from tests.terminal.test_kv_events import going_on
from tests.waiting import until

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
