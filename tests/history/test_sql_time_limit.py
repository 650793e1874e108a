"""A query of `monitor sql` ends at its time limit, and one that keeps it has all its rows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.lab.stepped_recordings import recording_of
from kvscope.monitor.history.sql_query import SqlSource
from kvscope.monitor.terminal.cli import main
from tests.history.queried import asked
from tests.waiting import PATIENCE_S

ENDLESS = "SELECT count(*) FROM range(3000000) AS a, range(3000000) AS b WHERE a.range * b.range = 7"
STARTED_S = 2.0


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    lab = Lab(total=60)
    lab.arrive(12, max_tokens=4)
    lab.step(seconds=0.3)
    return recording_of(lab, tmp_path / "recording")


def test_the_command_names_the_limit_and_exits_with_2(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sql", ENDLESS, str(recording), "--timeout", "2"]) == 2
    assert "stopped after 2 s" in capsys.readouterr().err


def test_a_query_within_its_limit_has_all_its_rows(recording: Path) -> None:
    rows = msgspec.json.decode(asked("SELECT * FROM range(50000)", SqlSource(recording)).rows)
    assert rows == [{"range": number} for number in range(50_000)]


def test_the_process_ends_with_the_command_and_leaves_nothing(recording: Path, tmp_path: Path) -> None:
    """Killed, so that the command itself can clear nothing away."""
    (tmp_path / "scratch").mkdir()
    command = subprocess.Popen(
        [sys.executable, "-m", "kvscope.monitor", "sql", ENDLESS, str(recording), "--timeout", "600"],
        env={**os.environ, "TMPDIR": str(tmp_path / "scratch")},
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (children := psutil.Process(command.pid).children()) or children[0].cpu_times().user < STARTED_S:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (child,) = children
    finally:
        command.send_signal(signal.SIGKILL)
        command.communicate()
    psutil.wait_procs([child], 30)
    assert not child.is_running()
    assert [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()] == []
