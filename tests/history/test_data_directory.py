"""A data directory that is deleted, moved, read by others or full, under a service that runs."""

from __future__ import annotations

import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvscope.monitor.contract import journal
from kvscope.monitor.contract.kinds import Kind
from kvscope.monitor.contract.wire import Batch, decode
from kvscope.monitor.outputs.alerting.alert_store import AlertStore
from kvscope.monitor.sources.live_stream import LiveStream
from tests.waiting import PATIENCE_S, until
from tests.web.parts import Engine, service

BLIND = "blind.reader-failed"


def kinds_in(directory: Path) -> set[Kind]:
    found: set[Kind] = set()
    for segment in journal.journal_segments(directory):
        for payload in journal.read_segment(segment.path):
            frame = decode(payload)
            if isinstance(frame, Batch):
                found |= {Kind(event.kind) for event in frame.events()}
    return found


def sequences_in(directory: Path) -> set[int]:
    segments = journal.journal_segments(directory)
    frames = [decode(payload) for segment in segments for payload in journal.read_segment(segment.path)]
    return {frame.sequence for frame in frames if isinstance(frame, Batch)}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_directory_that_goes_is_reported_and_written_anew(tmp_path: Path, how: str) -> None:
    data = tmp_path / "data"
    alerts = ("--alert", "http://127.0.0.1:9/hook", "--alert-private")
    with (
        Engine(tmp_path, total=400) as engine,
        service("--events", engine.events, "--data", str(data), *alerts) as url,
        httpx2.Client(base_url=url, trust_env=False) as client,
    ):
        (history,) = until(lambda: list(data.glob("history/*@*")), "the engine's history")
        until(lambda: list(history.glob("*.kvj")), "a segment")
        assert Kind.LOST not in kinds_in(history)
        assert BLIND not in {each["code"] for each in client.get("/api/findings").json()}
        time.sleep(1)
        before = sequences_in(history)
        if how == "deleted":
            shutil.rmtree(data)
        else:
            data.rename(tmp_path / "moved")

        def blind() -> list[dict[str, Any]]:
            return [each for each in client.get("/api/findings").json() if each["code"] == BLIND]

        found = until(blind, "a finding")
        assert any("deleted" in each["explanation"] for each in found)
        until(lambda: (data / "alerts.sqlite").exists(), "the outbox")
        until(lambda: list(history.glob("*.kvj")), "a new segment")
        until(lambda: before <= sequences_in(history), "the batches that are in memory still")
        assert Kind.LOST not in kinds_in(history)
        assert not any(each["error"] for each in client.get("/api/sources").json())


def test_what_is_kept_is_its_owners_alone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "history").mkdir(parents=True)
    earlier = data / "history" / "findings.jsonl"
    earlier.write_text("")
    earlier.chmod(0o644)
    data.chmod(0o755)
    alerts = ("--alert", "http://127.0.0.1:9/hook", "--alert-private")
    with Engine(tmp_path) as engine, service("--events", engine.events, "--data", str(data), *alerts):
        until(lambda: list(data.glob("history/*/*.kvj")), "a segment")
    for path in [*data.rglob("*")]:
        allowed = 0o700 if path.is_dir() else 0o600
        assert path.stat().st_mode & 0o777 & ~allowed == 0, path


def test_an_outbox_that_is_deleted_is_written_again_with_all_that_is_open(tmp_path: Path) -> None:
    path = tmp_path / "data" / "alerts.sqlite"
    path.parent.mkdir()
    store = AlertStore(path, (), 0.0)
    try:
        with store.writing() as database:
            database.execute("INSERT INTO silences (silence, until) VALUES (x'00', 1.0)")
        assert not store.is_deleted()
        shutil.rmtree(path.parent)
        assert store.is_deleted()
        store.write_again()
        assert not store.is_deleted()
    finally:
        store.close()
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM silences").fetchone() == (1,)
    database.close()


@pytest.mark.parametrize("followed", [False, True])
def test_the_first_batches_of_a_new_epoch_are_received(tmp_path: Path, followed: bool) -> None:
    """The subscription misses what an engine publishes before the connection stands; its ring has that."""
    seen: list[tuple[int, int]] = []

    def take(stream: LiveStream, count: int) -> int:
        before = len(seen)
        deadline = time.monotonic() + PATIENCE_S
        while len(seen) - before < count:
            assert time.monotonic() < deadline
            batches = [frame for frame in stream.poll(0.1) if isinstance(frame, Batch) and frame.sequence >= 0]
            seen.extend((batch.epoch, batch.sequence) for batch in batches)
        return seen[-1][0]

    stream = LiveStream(f"ipc://{tmp_path}/events")
    try:
        if followed:
            with Engine(tmp_path):
                take(stream, 20)
        began_s = time.monotonic()
        with Engine(tmp_path):
            until(lambda: time.monotonic() - began_s > 0.5, "half a second of events")
            epoch = take(stream, 40)
    finally:
        stream.close()
    of_last = [sequence for each, sequence in seen if each == epoch]
    assert of_last == list(range(len(of_last)))
