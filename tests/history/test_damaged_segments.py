"""A closed segment that is damaged: it is logged and skipped, and what the other segments hold is still read."""

from __future__ import annotations

import logging
import os
import zlib
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from kvscope.monitor.contract.journal import HEADER, RECORD
from kvscope.monitor.contract.wire import encode
from kvscope.monitor.history.history import History
from kvscope.monitor.history.sealed_segment import write_tables
from kvscope.monitor.history.segment_readers import Opened
from kvscope.monitor.history.sql_query import SqlSource
from kvscope.monitor.history.sql_tables import SqlAnswer, with_answer
from kvscope.monitor.terminal.cli import main
from tests.history.recorded import ledger_state, worked, write

ENGINE = "lab@127.0.0.1:0"
TABLES = ("events", "frames", "keyframes", "points", "notes")


def history_of(tmp_path: Path) -> tuple[Path, int]:
    """One engine whose run lies in a closed segment and, from a keyframe on, in an open one; and the run's end."""
    lab = worked(30)
    engine = tmp_path / "history" / ENGINE
    first, second = tmp_path / "first", tmp_path / "second"
    middle = len(lab.frames)
    keyframe = lab.keyframe()
    write(first, [*lab.frames, keyframe])
    (path,) = first.iterdir()
    assert write_tables(path, engine) is not None
    for _ in range(30):
        lab.arrive(lab.rng.randint(1, 60), max_tokens=8)
        lab.step()
    write(second, [keyframe, *lab.frames[middle:]])
    (path,) = second.iterdir()
    path.rename(engine / f"{keyframe.epoch:020d}-{lab.frames[middle].sequence:015d}.kvj")
    return tmp_path / "history", lab.frames[-1].wall_ns


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    match how:
        case "footer":
            data[-20:] = b"\xff" * 20
        case "zeros":
            data[:] = bytes(len(data))
        case "short":
            del data[len(data) // 2 :]
        case "empty":
            data.clear()
        case _:
            for at in range(4, len(data) - 200, 7):
                data[at] ^= 0x10
    path.write_bytes(data)


def read_all(history: History) -> int:
    for engine in history.engines():
        history.points(engine, 0, 1 << 62)
        list(history.notes(engine, 0, 1 << 62))
        history.last_ns(engine)
    return sum(1 for engine in history.engines() for _ in history.batches(engine, 0, 1 << 62))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("how", ["footer", "zeros", "short", "empty", "flipped"])
def test_damage_is_logged_and_takes_only_its_segment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, table: str, how: str
) -> None:
    directory, end_ns = history_of(tmp_path)
    sound = History(directory)
    batches = read_all(sound)
    expected = ledger_state(sound.ledger_at(ENGINE, end_ns))
    (path,) = directory.rglob(f"{table}.parquet")
    damage(path, how)
    history = History(directory)
    with caplog.at_level(logging.WARNING):
        left = read_all(history)
    assert 0 < left <= batches
    assert ledger_state(history.ledger_at(ENGINE, end_ns)) == expected
    list(history.tail(ENGINE, 0))
    assert [record.getMessage() for record in caplog.records if str(path.parent) in record.getMessage()]
    span = history.span(ENGINE)
    assert span is not None
    assert table == "frames" or any(gap.bytes_lost for gap in span.gaps)


def test_a_sound_history_reports_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory, _ = history_of(tmp_path)
    history = History(directory)
    with caplog.at_level(logging.WARNING):
        assert read_all(history)
    span = history.span(ENGINE)
    assert span is not None
    assert not caplog.records
    assert not any(gap.bytes_lost for gap in span.gaps)


def test_a_flipped_bit_in_a_page_fails_its_checksum(tmp_path: Path) -> None:
    directory, _ = history_of(tmp_path)
    (path,) = directory.rglob("frames.parquet")
    column = pq.read_metadata(path).row_group(0).column(0)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    path.write_bytes(data)
    history = History(directory)
    read_all(history)
    assert path.parent in history._damage


@pytest.mark.parametrize("table", ["events", "frames", "points"])
@pytest.mark.parametrize("how", ["footer", "zeros", "short", "empty", "flipped"])
def test_sql_leaves_out_a_damaged_file_and_names_it(tmp_path: Path, table: str, how: str) -> None:
    directory, _ = history_of(tmp_path)
    asked = {"events": "FROM events", "frames": "FROM requests", "points": "FROM points"}[table]
    (path,) = directory.rglob(f"{table}.parquet")
    damage(path, how)

    def taken(found: SqlAnswer) -> tuple[int, list[str]]:
        return sum(1 for _ in found.rows), found.left_out

    rows, left_out = with_answer(asked, SqlSource(directory), taken)
    assert rows > 0 or table == "points"  # of which this history has none
    assert left_out == [f"{path} is damaged and is left out"]


def test_the_command_skips_what_is_no_segment_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A FIFO in its place, for which no writer ever comes, and bytes of something else."""
    directory, _ = history_of(tmp_path)
    query = ["sql", "SELECT count(*) AS n FROM events", "--data", str(tmp_path), "--format", "csv", "--timeout", "30"]
    whole, sides = [], [next(directory.rglob("events.parquet")), next(directory.rglob("*.kvj"))]
    for path in sides:
        aside = path.rename(path.with_name("aside"))
        os.mkfifo(path)
        assert main(query) == 0
        answer = capsys.readouterr()
        whole.append(int(answer.out.split()[1]))
        assert answer.err == f"monitor sql: {path} is no regular file and is left out\n"
        path.unlink()
        aside.rename(path)
    assert main(query) == 0
    assert sum(whole) == int(capsys.readouterr().out.split()[1])
    sides[1].write_bytes(b"gone")
    assert main(query) == 0
    answer = capsys.readouterr()
    assert int(answer.out.split()[1]) == whole[1]
    assert f"{sides[1]} is not a segment of a kvscope journal" in answer.err


@pytest.mark.parametrize("letter", [b"B", b"P", b"S"])
def test_records_that_nest_too_deep_or_have_no_time_are_left_out(tmp_path: Path, letter: bytes) -> None:
    frame = encode(worked(2).frames[0])
    deep = b"\x91" * 5000
    bodies = (deep, b"\x97\xa1e" + b"\x01" * 5 + deep, b"\x81\xa1x" + deep, b"\x9d\xa1x" + (b"\xcf" + b"\xff" * 8) * 12)
    payloads = [frame[:4] + letter + body for body in bodies]
    path = tmp_path / f"{1:020d}-{0:015d}.kvj"
    path.write_bytes(HEADER + b"".join(RECORD.pack(len(each), zlib.crc32(each)) + each for each in payloads))
    reader = Opened(path)
    reader.refresh()
    assert not len(reader.index)
    assert not list(reader.kept_notes())


def test_a_time_beyond_64_bits_is_left_out(tmp_path: Path) -> None:
    lab = worked(2)
    frame = msgspec.structs.replace(lab.frames[0], wall_ns=(1 << 64) - 1)
    write(tmp_path, [frame, *lab.frames[1:]])
    (path,) = tmp_path.iterdir()
    reader = Opened(path)
    reader.refresh()
    assert len(reader.index) == len(lab.frames) - 1
