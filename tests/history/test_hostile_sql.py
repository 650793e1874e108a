"""No statement writes, outgrows its bounds or outlasts its deadline, whatever it is; and reads go on working."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvscope.monitor.contract import journal
from kvscope.monitor.history.sealed_segment import close
from kvscope.monitor.terminal.cli import main
from tests.history.hostile_sql import COPIES, READS, aimed, fingerprint
from tests.history.recorded import worked
from tests.history.test_writer import ReceivedRecords

GROWTH_BYTES = 50 << 20


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a service keeps: a closed segment and an open one, findings, alerts."""
    data = tmp_path_factory.mktemp("data")
    lab = worked(120, total=40)
    received = ReceivedRecords(data / "history", lab)
    received.receive(lab.frames[:60])
    received.writer.stop(received.ledger)
    (first,) = journal.journal_segments(received.directory)
    assert close(first.path, received.directory) is not None
    again = ReceivedRecords(data / "history", lab, received.ledger)
    again.receive(lab.frames[60:])
    again.writer.stop(again.ledger)
    (data / "history" / "findings.jsonl").write_text("")
    (data / "alerts.sqlite").write_bytes(b"a secret")
    return data


@pytest.mark.slow
def test_a_copy_inside_a_query_writes_nothing(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = fingerprint(data)
    for statement in (COPIES[1], COPIES[2], COPIES[7], COPIES[9], COPIES[13]):
        assert main(["sql", aimed(statement, data), "--data", str(data)]) == 2
        assert "one query that reads" in capsys.readouterr().err
        assert fingerprint(data) == before, statement


def test_each_form_of_a_read_works(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for query in READS:
        assert main(["sql", query, "--data", str(data), "--format", "csv"]) == 0, query
        answer = capsys.readouterr()
        assert len(answer.out.splitlines()) > (query != READS[4]), query  # there is no finding: no column has a row
        assert answer.err == ""


@pytest.mark.slow
def test_an_answer_beyond_its_bound_is_refused_in_any_form(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = ["sql", "SELECT repeat('x', 1000) AS x FROM range(1000)", "--data", str(data)]
    for form in ("table", "csv", "json"):
        assert main([*query, "--format", form, "--max-bytes", "900K"]) == 2
        assert "more than 921,600 bytes" in capsys.readouterr().err
    assert main([*query, "--format", "csv", "--max-bytes", "2M"]) == 0
    assert len(capsys.readouterr().out) > 1_000_000


@pytest.mark.slow
def test_no_statement_writes_outgrows_or_outlasts(data: Path, tmp_path: Path) -> None:
    """Asked as an agent asks for a hub, in a process of its own: this one has the memory of other tests."""
    shutil.copytree(data, tmp_path / "data")
    command = [sys.executable, "-m", "tests.history.hostile_asking", os.fspath(tmp_path / "data")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    print(found)
    assert found["wrong"] == []
    assert found["grown"] < GROWTH_BYTES
    assert not found["left"]
