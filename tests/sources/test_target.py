"""What a target is, by its looks: the grammar that doctor and record share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvscope.monitor.history.recorder
import kvscope.monitor.terminal.commands.record  # noqa: F401 - imported late, they might not be readable
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base.errors import BadTarget
from kvscope.monitor.contract.journal import HEADER, JournalWriter
from kvscope.monitor.contract.wire import encode
from kvscope.monitor.sources.targets import TargetKind, kind_of
from kvscope.monitor.terminal.cli import main


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("tcp://127.0.0.1:5757", TargetKind.STREAM),
        ("ipc:///run/kvscope/events", TargetKind.STREAM),
        ("http://127.0.0.1:8000/metrics", TargetKind.METRICS),
        ("https://engine.example/a/metrics/", TargetKind.METRICS),
        ("http://127.0.0.1:8000/metrics?name[]=vllm:num_requests_running", TargetKind.METRICS),
        ("http://127.0.0.1:8000/kv_event_sources", TargetKind.KV_EVENTS),
        ("http://127.0.0.1:8765", TargetKind.SERVICE),
        ("http://127.0.0.1:8765/", TargetKind.SERVICE),
        ("https://kvscope.example/metrics/explained", TargetKind.SERVICE),
        ("http://127.0.0.1:8765/?next=/metrics", TargetKind.SERVICE),
    ],
)
def test_addresses(target: str, kind: TargetKind) -> None:
    assert kind_of(target) is kind


def test_files_are_looked_into(tmp_path: Path) -> None:
    with pytest.raises(BadTarget, match="holds no recording"):
        kind_of(str(tmp_path))
    log = tmp_path / "recording.kvj"  # a name says nothing
    log.write_text("INFO a log\n")
    assert kind_of(str(log)) is TargetKind.LOG
    writer = JournalWriter(tmp_path / "journal", 1)
    writer.append(encode(Lab().frames[0]), 0)
    writer.close()
    assert kind_of(str(tmp_path / "journal")) is TargetKind.RECORDING
    (segment,) = (tmp_path / "journal").iterdir()
    renamed = segment.rename(tmp_path / "server.log")
    assert kind_of(str(renamed)) is TargetKind.RECORDING
    assert renamed.read_bytes().startswith(HEADER)


@pytest.mark.parametrize("target", ["nowhere", "tcp:/127.0.0.1:5757", "127.0.0.1:5757", "ftp://a/b", "udp://a:1"])
def test_what_is_nothing_hears_what_would_be(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadTarget, match=r"tcp://127\.0\.0\.1:5757.*http://127\.0\.0\.1:8765.*a directory.*a file"):
        kind_of(target)


@pytest.mark.parametrize("target", ["tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://[::1]", "tcp://a:0", "tcp://a:65536"])
def test_a_stream_needs_a_port(target: str) -> None:
    with pytest.raises(BadTarget, match=r"names no port from 1 to 65535.*tcp://127\.0\.0\.1:5757"):
        kind_of(target)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A segment whose name is a directory's cannot be read by anybody, root included."""
    segment = tmp_path / f"{1:020d}-{0:015d}.kvj"
    segment.mkdir()
    with pytest.raises(BadTarget, match=f"{segment}: cannot be read: Is a directory"):
        kind_of(str(tmp_path))
    long = "a" * 300
    with pytest.raises(BadTarget, match=f"{long}: cannot be read: File name too long"):
        kind_of(long)


@pytest.fixture
def not_ours(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process may neither read nor write while the test runs."""
    folder = tmp_path / "kept"
    folder.mkdir(mode=0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield folder
    os.seteuid(user)


def test_what_this_user_may_not_read(not_ours: Path) -> None:
    for target in (not_ours, not_ours / "server.log"):
        with pytest.raises(BadTarget, match=f"{target}: cannot be read: Permission denied"):
            kind_of(str(target))


def test_where_this_user_may_not_write(not_ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "tcp://127.0.0.1:1", str(not_ours / "run"), "--timeout", "1"]) == 2
    assert f"monitor: {not_ours / 'run'}: permission denied" in capsys.readouterr().err
