"""`monitor doctor` where a vLLM publishes KV events and nothing else is known of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec
import pytest

from kvscope.lab.kv_publisher import KvPublisher, Recorded, encoded, publishing, recorded, telling
from kvscope.monitor.sources.targets import SOURCES_PATH
from tests.terminal.test_doctor import doctor_json

QUICK = ("--for", "0.5", "--timeout", "10")


@contextlib.contextmanager
def going_on(publisher: KvPublisher, after: list[Recorded]) -> Iterator[None]:
    """The engine works on: a batch without events every now and then."""
    stop = Event()

    def work() -> None:
        sequence = len(after)
        while not stop.wait(0.05):
            publisher.publish(sequence, encoded(Recorded(sequence, after[-1].ts, []), "maps"))
            sequence += 1

    thread = Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def check(code: int, printed: dict[str, Any], batches: list[Recorded]) -> None:
    assert (code, printed["findings"]) == (0, [])
    (seen,) = printed["targets"]
    assert (seen["kind"], seen["status"]) == ("kv-events", "ok")
    events = [event for batch in batches for event in batch.events]
    stored = sum(len(event["block_hashes"]) for event in events if event["type"] == "BlockStored")
    assert any(f"{stored:,} stored" in note for note in seen["notes"])
    assert any("KV events do not show usage" in note for note in seen["notes"])
    (balance,) = printed["balances"]
    assert (balance["usage"], balance["running_requests"], balance["total"]) == (None, None, None)


def test_a_stream_tells_what_it_is_by_its_first_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    batches = recorded("kv-events")
    with publishing(tmp_path, batches) as publisher, going_on(publisher, batches):
        code, printed = doctor_json(capsys, publisher.endpoint, *QUICK)
    check(code, printed, batches)


def test_a_server_tells_where_its_events_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Idle, too: what it remembers is enough."""
    batches = recorded("kv-events")
    with publishing(tmp_path, batches) as publisher:
        source = {"endpoint": publisher.endpoint, "replay_endpoint": f"{publisher.endpoint}-replay"}
        with telling(msgspec.json.encode([source])) as url:
            code, printed = doctor_json(capsys, url, *QUICK)
    check(code, printed, batches)
    assert printed["targets"][0]["engines"] == [f"vllm@{url.removeprefix('http://').partition('/')[0]}/0"]


def test_nobody_publishes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with telling(msgspec.json.encode([{"endpoint": f"ipc://{tmp_path}/nobody"}])) as url:
        code, printed = doctor_json(capsys, url, "--timeout", "0.3")
    assert code == 3
    assert "no KV event came" in printed["targets"][0]["error"]
    code, printed = doctor_json(capsys, f"ipc://{tmp_path}/nobody", "--timeout", "0.3")
    assert code == 3
    assert SOURCES_PATH in printed["targets"][0]["error"]
