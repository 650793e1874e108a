"""Reading a large text shows how far it is, on a terminal and nowhere else."""

from __future__ import annotations

import gzip
import io
import re
import sys
from pathlib import Path

import pytest

from kvscope.monitor.sources import log_file
from kvscope.monitor.sources.log_file import read_log

LINE = "INFO 11-20 12:00:00 [core.py:1] nothing of note\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _every_text_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "LARGE_BYTES", 1 << 12)
    monkeypatch.setattr(log_file, "REFRESH_S", 0.0)


def shown_while_reading(path: Path, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        read_log(path)
    return stream.getvalue()


@pytest.mark.parametrize("name", ["engine.log", "engine.log.gz"])
def test_a_large_text_shows_how_far_it_is_and_clears_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / name
    content = (LINE * 20_000).encode()
    path.write_bytes(gzip.compress(content, 0) if name.endswith("gz") else content)
    shown = shown_while_reading(path, Terminal(), monkeypatch)
    shares = [int(share) for share in re.findall(r"(\d+)% of", shown)]
    assert f"reading {name}: " in shown
    assert len(shares) >= 4
    assert shares == sorted(shares)
    assert shares[-1] <= 100
    assert shown.endswith(" \r")


def test_a_small_text_and_a_pipe_show_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "engine.log"
    path.write_text(LINE)
    assert not shown_while_reading(path, Terminal(), monkeypatch)
    path.write_text(LINE * 20_000)
    assert not shown_while_reading(path, io.StringIO(), monkeypatch)
