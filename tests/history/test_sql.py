"""SQL over what was kept: its tables say what the ledger says, of open segments and closed ones, and it only reads."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvscope.monitor.contract import journal
from kvscope.monitor.contract.kinds import Kind, Status, name_of
from kvscope.monitor.contract.wire import Batch
from kvscope.monitor.history.sealed_segment import close
from kvscope.monitor.history.segment_files import directory_of
from kvscope.monitor.history.sql_query import BadQuery, SqlSource
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.event_history import scan_events
from kvscope.monitor.terminal.cli import main
from tests.detectors.scenes import finished_held
from tests.history.queried import rows_of
from tests.history.recorded import folded, worked, write
from tests.history.test_writer import ReceivedRecords

DOCS = Path(__file__).parent.parent.parent / "docs" / "history.md"


def ask(query: str, directory: Path) -> list[dict[str, Any]]:
    return rows_of(query, SqlSource(directory))


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Batch], EngineLedger]:
    """A history of which one segment is closed and others are open, what was said, and the ledger at its end."""
    directory = tmp_path_factory.mktemp("data") / "history"
    lab = worked(300, total=40)
    received = ReceivedRecords(directory, lab)
    received.receive(lab.frames[:150])
    received.writer.stop(received.ledger)
    (first,) = journal.journal_segments(received.directory)
    assert close(first.path, received.directory) is not None
    again = ReceivedRecords(directory, lab, received.ledger)
    again.receive(lab.frames[150:])
    again.writer.stop(again.ledger)
    batches = [frame for frame in lab.frames if isinstance(frame, Batch)]
    return directory, batches, folded(list(lab.frames), lab.frames[-1].wall_ns)


def test_events_are_what_was_said(history: tuple[Path, list[Batch], EngineLedger]) -> None:
    directory, batches, _ = history
    rows = ask("SELECT * FROM events ORDER BY epoch, sequence, event", directory)
    stated = list(scan_events(batches, None))
    assert len(rows) == len(stated)
    for row, (position, at_ns, event) in zip(rows, stated, strict=True):
        assert (row["epoch"], row["sequence"], row["event"]) == position
        assert (row["kind"], row["kv_group"], row["request"]) == (name_of(Kind, event.kind), event.group, event.request)
        of_hashes = event.kind in (Kind.ALLOCATED, Kind.CACHED)
        assert (row["hashes"] if of_hashes else row["args"], row["ids"]) == (event.args, event.ids)
        if event.kind != Kind.HEARTBEAT:
            assert row["at_ns"] == at_ns


def test_requests_are_what_the_ledger_knows(history: tuple[Path, list[Batch], EngineLedger]) -> None:
    directory, _, ledger = history
    rows = {row["request"]: row for row in ask("FROM requests", directory)}
    known = [*ledger.ended, *ledger.state.requests.values()]
    assert rows.keys() == {record.number for record in known}
    for record in known:
        row = rows[record.number]
        assert row["id"] == record.id
        assert (row["prompt_tokens"], row["max_tokens"]) == (record.prompt_tokens, record.max_tokens)
        assert (row["preemptions"], row["tokens_lost"]) == (record.preemptions, record.tokens_lost)
        assert row["status"] == (Status(record.status).name if record.is_finished else None)
    assert any(row["preemptions"] for row in rows.values())


def test_points_are_the_ledgers(history: tuple[Path, list[Batch], EngineLedger]) -> None:
    directory, _, ledger = history
    points = {point.at_ns: point for point in ledger.points}
    assert ask(
        "SELECT count(*) AS n FROM points WHERE time < now() AND time <> make_timestamp(at_ns // 1000)", directory
    ) == [{"n": 0}]
    rows = ask("SELECT at_ns, blocks_free, blocks_running, running FROM points", directory)
    assert len(rows) > 10
    for row in rows:
        point = points[row["at_ns"]]
        assert (row["blocks_free"], row["blocks_running"]) == (point.balance.free, point.balance.running)
        assert row["running"] == point.running


@pytest.mark.slow
def test_a_recording_has_points_and_findings_once_it_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = finished_held()
    scene.live(120)
    write(tmp_path, list(scene.lab.frames))
    query = "SELECT code, state, requests FROM findings WHERE code = 'leak.finished-held'"
    assert main(["sql", query, str(tmp_path), "--format", "json"]) == 0
    (finding,) = json.loads(capsys.readouterr().out)
    assert finding["state"] == "firing"
    assert finding["requests"]
    assert main(["sql", "SELECT max(blocks_finished) AS held FROM points", str(tmp_path), "--format", "csv"]) == 0
    header, row = csv.reader(io.StringIO(capsys.readouterr().out))
    assert header == ["held"]
    assert int(row[0]) > 0
    kinds = Counter(event.kind for _, _, event in scan_events(scene.lab.frames, None))  # type: ignore[arg-type]
    assert main(["sql", "SELECT count(*) AS n FROM events WHERE kind = 'FINISHED'", str(tmp_path)]) == 0
    assert str(kinds[Kind.FINISHED]) in capsys.readouterr().out


def test_it_reads_the_history_and_nothing_else(history: tuple[Path, list[Batch], EngineLedger], tmp_path: Path) -> None:
    directory, *_ = history
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    for query, says in (
        ("COPY (SELECT 1) TO 'x.csv'", "one query that reads"),
        ("CREATE TABLE a (b INT)", "one query that reads"),
        ("SELECT 1; SELECT 2", "one query that reads"),
        ("SET threads = 64", "one query that reads"),
        (f"FROM read_csv('{secret}')", "disabled"),
        (f"FROM '{secret}'", "disabled"),
        ("FROM nothing", "nothing does not exist"),
        ("SELEC 1", "syntax error"),
    ):
        with pytest.raises(BadQuery, match=says):
            ask(query, directory)
    assert not (directory / "x.csv").exists()


def test_where_nothing_is_kept_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty" / "history").mkdir(parents=True)
    for arguments, says in (
        (["--data", str(tmp_path)], "holds no history"),
        (["--data", str(tmp_path / "empty")], "no segment has been kept yet"),
        ([str(tmp_path / "recording")], "is not a recording"),
        ([str(tmp_path / "empty")], "no segment"),
        ([], "name a RECORDING"),
        ([str(tmp_path), "--data", str(tmp_path)], "not both"),
    ):
        assert main(["sql", "FROM events", *arguments]) == 2
        assert says in capsys.readouterr().err


def test_the_docs_have_every_column(history: tuple[Path, list[Batch], EngineLedger]) -> None:
    directory, *_ = history
    page = DOCS.read_text()
    for table in ("events", "requests", "findings", "points"):
        section = page.partition(f"### `{table}`")[2].partition("\n#")[0]
        columns = [row["column_name"] for row in ask(f"DESCRIBE {table}", directory)]
        documented = [
            name.strip(" `")
            for line in section.splitlines()
            if line.startswith("| `")
            for name in line.split("|")[1].split(",")
        ]
        assert documented == columns


def test_the_queries_in_the_docs_run(history: tuple[Path, list[Batch], EngineLedger]) -> None:
    """The third one's answer is what the books have: how many references each block has."""
    directory, _, ledger = history
    queries = re.findall(r'monitor sql "(.+?)"', DOCS.read_text(), re.DOTALL)
    assert len(queries) == 5
    _, _, held, *_ = [ask(query.replace("LIMIT 20", ""), directory) for query in queries]  # the last two: an archive's
    refs = ledger.state.refs
    assert any(refs)
    assert {row["block"]: row["holds"] for row in held} == {
        block: refs[block] for block in range(len(refs)) if refs[block]
    }


def test_an_engine_is_named_as_its_directory_says(history: tuple[Path, list[Batch], EngineLedger]) -> None:
    directory, batches, _ = history
    (row,) = ask("SELECT DISTINCT engine FROM events", directory)
    assert directory_of(directory, row["engine"]).is_dir()
    assert row["engine"] == batches[0].engine
