"""What a target is, by its looks: the grammar that doctor and record share."""

from __future__ import annotations

from pathlib import Path

import pytest

from monitor.events.journal import HEADER, JournalWriter
from monitor.events.wire import encode
from monitor.sources.target import BadTarget, Kind, kind_of
from tests.lab import Lab


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("tcp://127.0.0.1:5757", Kind.STREAM),
        ("ipc:///run/kvscope/events", Kind.STREAM),
        ("http://127.0.0.1:8000/metrics", Kind.METRICS),
        ("https://engine.example/a/metrics/", Kind.METRICS),
        ("http://127.0.0.1:8000/metrics?name[]=vllm:num_requests_running", Kind.METRICS),
        ("http://127.0.0.1:8000/kv_event_sources", Kind.KV_EVENTS),
        ("http://127.0.0.1:8765", Kind.SERVICE),
        ("http://127.0.0.1:8765/", Kind.SERVICE),
        ("https://kvscope.example/metrics/explained", Kind.SERVICE),
        ("http://127.0.0.1:8765/?next=/metrics", Kind.SERVICE),
    ],
)
def test_addresses(target: str, kind: Kind) -> None:
    assert kind_of(target) is kind


def test_files_are_looked_into(tmp_path: Path) -> None:
    with pytest.raises(BadTarget, match="holds no recording"):
        kind_of(str(tmp_path))
    log = tmp_path / "recording.kvj"  # a name says nothing
    log.write_text("INFO a log\n")
    assert kind_of(str(log)) is Kind.LOG
    writer = JournalWriter(tmp_path / "journal", 1)
    writer.append(encode(Lab().frames[0]), 0)
    writer.close()
    assert kind_of(str(tmp_path / "journal")) is Kind.RECORDING
    (segment,) = (tmp_path / "journal").iterdir()
    renamed = segment.rename(tmp_path / "server.log")
    assert kind_of(str(renamed)) is Kind.RECORDING
    assert renamed.read_bytes().startswith(HEADER)


@pytest.mark.parametrize("target", ["nowhere", "tcp:/127.0.0.1:5757", "127.0.0.1:5757", "ftp://a/b", "udp://a:1"])
def test_what_is_nothing_hears_what_would_be(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadTarget, match=r"tcp://127\.0\.0\.1:5757.*http://127\.0\.0\.1:8765.*a directory.*a file"):
        kind_of(target)
