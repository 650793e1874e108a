"""A closed segment: a journal's file turned into tables that take an eighth of its room and support SQL.

    events.parquet      an event a row, as it was sent: its arguments and ids are lists
    frames.parquet      a frame a row, in order: the header of a batch, and the places of keyframes
    keyframes.parquet   the keyframes, packed
    points.parquet      the points of the ledger
    notes.parquet       samples and facts, packed

The frames come back from it as they were sent, so that the state at a moment is read from it as from a journal.
"""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, get_type_hints

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ..contract.kinds import SCHEMA, Kind, name_of
from ..contract.wire import ADDED_BY_SOURCE, Batch, Frame, Keyframe, decode, encode
from ..ledger.balance import Balance
from ..ledger.engine_ledger import Point
from .segment_files import LETTER_OF_POINTS, ClosedSegment, Index, Packed, name_of_closed, pack
from .segment_readers import Opened

Ints = npt.NDArray[np.int64]

ROWS_A_GROUP: Final = {"events": 1 << 14, "frames": 1 << 10, "keyframes": 1}
"""Rows that are read together: the surplus for one query is at most this many at either end."""
FRAMES_TOGETHER_BYTES: Final = 4 << 20
"""Frames that are turned into rows together. Ten groups of events, so that few are shorter than they may be."""
_SIDE_EVENTS: Final = (Kind.RECEIVED, Kind.CLIENT_GONE, Kind.STALLED, Kind.HEARTBEAT)
"""By other threads, with a time of their own that is not that of the events that follow."""
_TIMED_COLUMNS: Final = [kind for kind, fields in SCHEMA.items() if fields.args[:1] == ("at_ns",)]

_HASHED: Final = (Kind.ALLOCATED, Kind.CACHED)
"""Whose arguments are hashes and nothing else: they have a column of their own, since nothing in them is alike."""

_OF_BATCH: Final = (
    "sequence",
    "first_step",
    "last_step",
    "wall_ns",
    "mono_ns",
    "free",
    "cached_idle",
    "used",
    "total",
    "dropped_batches",
    "dropped_events",
)
_TEXTS: Final = pa.map_(pa.int32(), pa.string())
_POINT_FIELDS: Final = [name for name, of in get_type_hints(Point).items() if of is int]


# -------------------------------------------------------------------- closing


def close(path: Path, into: Path) -> ClosedSegment | None:
    """Turn the journal's file at `path` into a closed segment under `into`, by day, and remove the file, or None if
    there was nothing in it. A crash at any moment leaves the one or the other.
    """
    closed = write_tables(path, into)
    path.unlink()
    return closed


def write_tables(path: Path, into: Path) -> ClosedSegment | None:
    """Write the journal's file at `path` as a closed segment under `into`, and leave the file unchanged."""
    reader = Opened(path)
    reader.refresh()
    notes = list(reader.kept_notes())
    times = [*reader.index.wall[:1], *reader.index.wall[-1:], *(note.at_ns for note in notes if note.at_ns)]
    if not times:
        return None
    epoch, first_sequence = (int(part) for part in path.stem.split("-"))
    from_ns, to_ns = min(times), max(times)
    day = into / datetime.fromtimestamp(from_ns / 1e9, UTC).strftime("%Y-%m-%d")
    segment = ClosedSegment(
        epoch, first_sequence, day / name_of_closed(epoch, first_sequence, from_ns, to_ns), from_ns, to_ns
    )
    half = day / f".{segment.path.name}"
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    _write_frames(reader, half)
    points = [point for note in notes if isinstance(point := note.note(), Point)]
    write_table(points_table(reader.index.engine, epoch, points), half / "points.parquet")
    write_table(_notes([note for note in notes if note.letter != LETTER_OF_POINTS]), half / "notes.parquet")
    half.rename(segment.path)
    return segment


def _write_frames(reader: Opened, directory: Path) -> None:
    """Write the tables of the frames, a part of them at a time: a whole segment would take four times its size."""
    first, before_ns = 0, None
    with ExitStack() as files:
        writers: dict[str, pq.ParquetWriter] = {}
        for frames in _parts(frame for _, frame in reader.frames(0, len(reader.index))):
            events, before_ns = _sealed_events([frame for frame in frames if isinstance(frame, Batch)], before_ns)
            for name, table in (
                ("events", events),
                ("frames", _frames(frames)),
                ("keyframes", _keyframes(frames, first)),
            ):
                if name not in writers:
                    path = directory / f"{name}.parquet"
                    writers[name] = files.enter_context(pq.ParquetWriter(path, table.schema, **_encoding(name)))
                writers[name].write_table(table, ROWS_A_GROUP[name])
            first += len(frames)


def _parts(frames: Iterable[Frame]) -> Iterator[list[Frame]]:
    """Yield the frames in order, about FRAMES_TOGETHER_BYTES of them at a time: once, if there are none."""
    part: list[Frame] = []
    size = 0
    for frame in frames:
        if size >= FRAMES_TOGETHER_BYTES:
            yield part
            part, size = [], 0
        part.append(frame)
        size += len(frame.state) if isinstance(frame, Keyframe) else len(frame.runs) + len(frame.args) + len(frame.ids)
    yield part


def write_table(table: pa.Table, path: Path) -> None:
    """Write one table of a segment that is small as a whole."""
    pq.write_table(table, path, **_encoding(path.stem))


def _encoding(name: str) -> dict[str, Any]:
    """How a segment's table is encoded, by what is in it."""
    settings: dict[str, Any] = {
        "compression": "zstd",
        "compression_level": 3,
        "write_statistics": True,
        "write_page_checksum": True,
    }
    if name == "events":
        split = ["args.list.element", "ids.list.element"]  # whose upper bytes hardly change
        deltas = ["sequence", "event", "at_ns", "request"]
        settings |= {
            "use_dictionary": [
                "engine",
                "kind",
                "hashes.list.element",
            ],  # a hash is in the event that adds it and in the one that removes it
            "column_encoding": dict.fromkeys(deltas, "DELTA_BINARY_PACKED") | dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        }
    return settings


def _sealed_events(batches: list[Batch], before_ns: int | None) -> tuple[pa.Table, int | None]:
    """Return the rows of these batches, and the time of their last event that has one, as `before_ns` is of those
    before (monotonic, None: no event had one).
    """
    runs = np.frombuffer(b"".join(batch.runs for batch in batches), np.int32).reshape(-1, 5)
    args = np.frombuffer(b"".join(batch.args for batch in batches), np.int64)
    ids = np.frombuffer(b"".join(batch.ids for batch in batches), np.int32)
    counts = np.array([len(batch.runs) // 20 for batch in batches], np.int64)
    of = np.repeat(np.arange(len(batches)), counts)
    sequence = np.array([batch.sequence for batch in batches], np.int64)
    args_end, ids_end = np.cumsum(runs[:, 3], dtype=np.int64), np.cumsum(runs[:, 4], dtype=np.int64)
    of_hashes = np.isin(runs[:, 0], _HASHED)
    is_hash = np.repeat(of_hashes, runs[:, 3])
    engine = pa.array([batch.engine for batch in batches], pa.string()).dictionary_encode()
    at_ns, before_ns = _sealed_times(batches, runs, args, args_end, of, before_ns)
    table = pa.table(
        {
            "engine": engine.take(pa.array(of)),
            "epoch": np.array([batch.epoch for batch in batches], np.int64)[of],
            "sequence": sequence[of],
            "event": (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.int32),
            "at_ns": at_ns,
            "kind": _named_columns(runs[:, 0]),
            "kv_group": runs[:, 1],
            "request": runs[:, 2],
            "args": _lists(args[~is_hash], np.cumsum(np.where(of_hashes, 0, runs[:, 3]))),
            "hashes": _lists(args[is_hash], np.cumsum(np.where(of_hashes, runs[:, 3], 0))),
            "ids": _lists(ids, ids_end),
        }
    )
    return table, before_ns


def _named_columns(kinds: npt.NDArray[np.int32]) -> pa.DictionaryArray:
    found, codes = np.unique(kinds, return_inverse=True)
    return pa.DictionaryArray.from_arrays(
        pa.array(codes, pa.int32()), pa.array([name_of(Kind, kind) for kind in found.tolist()], pa.string())
    )


def _numbers(named: pa.ChunkedArray) -> npt.NDArray[np.int32]:
    """Return the numbers behind the names of `_named`: a kind from a newer engine has its number in its name."""
    numbers = [
        np.array(
            [
                Kind[name] if name in Kind.__members__ else int(name.removeprefix("UNKNOWN(").rstrip(")"))
                for name in names
            ],
            np.int32,
        )[codes]
        for names, codes in ((chunk.dictionary.to_pylist(), chunk.indices.to_numpy()) for chunk in named.chunks)
    ]
    return np.concatenate(numbers)


def _lists(values: npt.NDArray[Any], ends: Ints) -> pa.ListArray:
    offsets = np.concatenate(([0], ends)).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values))


def _sealed_times(
    batches: list[Batch], runs: npt.NDArray[np.int32], args: Ints, args_end: Ints, of: Ints, before_ns: int | None
) -> tuple[Ints, int | None]:
    """Return when each event was (wall ns): its own time, or that of the last before it that has one, or its batch's.
    And that of the last that has one, as `before_ns` is of those before (monotonic).
    """
    wall = np.array([batch.wall_ns for batch in batches], np.int64)
    offset = wall - np.array([batch.mono_ns for batch in batches], np.int64)
    engines_own = np.array([batch.sequence != ADDED_BY_SOURCE for batch in batches], bool)
    kinds, n_args = runs[:, 0], runs[:, 3]
    timed = np.isin(kinds, _TIMED_COLUMNS) & (n_args > 0) & engines_own[of]
    carries = timed & ~np.isin(kinds, _SIDE_EVENTS)
    mono = np.zeros(len(runs), np.int64)
    mono[timed] = args[(args_end - n_args)[timed]]
    last = np.maximum.accumulate(np.where(carries, np.arange(len(runs)), -1))
    carried_ns = int(mono[last[-1]]) if len(last) and last[-1] >= 0 else before_ns
    last[timed] = np.flatnonzero(timed)
    known = ((last >= 0) | (before_ns is not None)) & engines_own[of]
    return np.where(known, np.where(last >= 0, mono[last], before_ns or 0) + offset[of], wall[of]), carried_ns


def _frames(frames: list[Frame]) -> pa.Table:
    columns: dict[str, Any] = {"keyframe": pa.array([isinstance(frame, Keyframe) for frame in frames], pa.bool_())}
    for name in _OF_BATCH:
        columns[name] = pa.array([getattr(frame, name, None) for frame in frames], pa.int64())
    batches = [frame if isinstance(frame, Batch) else None for frame in frames]
    columns["events"] = pa.array([len(batch.runs) // 20 if batch else 0 for batch in batches], pa.int32())
    columns["texts"] = pa.array([list(batch.texts.items()) if batch else [] for batch in batches], _TEXTS)
    engine = pa.array([frame.engine for frame in frames], pa.string())
    return pa.table({"engine": engine, "epoch": pa.array([frame.epoch for frame in frames], pa.int64()), **columns})


def _keyframes(frames: list[Frame], first: int) -> pa.Table:
    rows = [(row, encode(frame)) for row, frame in enumerate(frames, first) if isinstance(frame, Keyframe)]
    return pa.table(
        {
            "row": pa.array([row for row, _ in rows], pa.int64()),
            "payload": pa.array([body for _, body in rows], pa.binary()),
        }
    )


def points_table(engine: str, epoch: int, points: Sequence[Point]) -> pa.Table:
    """Points of an engine as they lie in a closed segment."""
    columns: dict[str, Any] = {
        "engine": pa.array([engine] * len(points), pa.string()),
        "epoch": pa.array([epoch] * len(points), pa.int64()),
    }
    for name in _POINT_FIELDS:
        columns[name] = pa.array([getattr(point, name) for point in points], pa.int64())
    for name in Balance.__struct_fields__:
        columns[f"blocks_{name}"] = pa.array([getattr(point.balance, name) for point in points], pa.int64())
    return pa.table({**columns, "packed": pa.array([pack(point) for point in points], pa.binary())})


def _notes(notes: list[Packed]) -> pa.Table:
    columns = zip(*notes, strict=True) if notes else ([], [], [])
    types = (pa.string(), pa.int64(), pa.binary())
    return pa.table({name: pa.array(c, t) for name, c, t in zip(Packed._fields, columns, types, strict=True)})


# -------------------------------------------------------------------- reading


class Closed:
    """The closed segment, to be read as an open one is."""

    def __init__(self, segment: ClosedSegment) -> None:
        self.path = segment.path
        self._from_ns = segment.from_ns

    @property
    def index(self) -> Index:
        """The index of its frames."""
        return self._frames_known[0]

    @cached_property
    def _frames_known(self) -> tuple[Index, Ints]:
        """The index, and how many events there are before each frame, and in all."""
        index = Index(self._from_ns)
        head = self._table("frames", ["engine", "keyframe", "sequence", "wall_ns", "mono_ns", "events"])
        index.engine = head["engine"][0].as_py() if len(head) else ""
        columns = [head[name].to_pylist() for name in ("keyframe", "sequence", "wall_ns", "mono_ns")]
        for row, (keyframe, sequence, wall_ns, mono_ns) in enumerate(zip(*columns, strict=True)):
            index.add(keyframe, sequence, wall_ns, mono_ns, row)
        events = head["events"].to_numpy()
        return index, np.concatenate(([0], np.cumsum(events)))

    @property
    def _events_until(self) -> Ints:
        return self._frames_known[1]

    @cached_property
    def point_times(self) -> array[int]:
        """See Opened."""
        return array("q", self._table("points", ["at_ns"])["at_ns"].to_numpy().tobytes())

    def frames(self, first: int, end: int) -> Iterator[tuple[int, Frame]]:
        """Yield the frames from number `first` up to, not including, `end`, each with its number."""
        if first >= end:
            return
        rows = self._rows("frames", None, first, end).to_pylist()
        begin = int(self._events_until[first])
        runs, args, ids = self._columns(begin, int(self._events_until[end]))
        a, i = np.concatenate(([0], np.cumsum(runs[:, 3]))), np.concatenate(([0], np.cumsum(runs[:, 4])))
        for number, row in enumerate(rows, first):
            if row["keyframe"]:
                yield number, self._keyframe(number)
                continue
            start, stop = (int(self._events_until[n]) - begin for n in (number, number + 1))
            columns = (runs[start:stop], args[a[start] : a[stop]], ids[i[start] : i[stop]])
            yield number, _batch(row, *(memoryview(np.ascontiguousarray(column).tobytes()) for column in columns))

    def texts(self) -> Iterator[tuple[int, int, dict[int, str]]]:
        """See Opened."""
        for row in self._table("frames", ["wall_ns", "epoch", "texts"]).to_pylist():
            if row["texts"]:
                yield row["wall_ns"], row["epoch"], dict(row["texts"])

    def kept_notes(self) -> Iterator[Packed]:
        """Yield the notes beside the frames."""
        points = self._table("points", ["at_ns", "packed"]).to_pylist()
        notes = self._table("notes").to_pylist()
        yield from (Packed(LETTER_OF_POINTS, point["at_ns"], point["packed"]) for point in points)
        yield from (Packed(**note) for note in notes)

    def points(self, rows: Sequence[int]) -> Iterator[Point]:
        """See Opened."""
        kept = self._table("points", ["packed"])["packed"] if rows else []
        for row in rows:
            point = Packed(LETTER_OF_POINTS, 0, kept[row].as_py()).note()
            if isinstance(point, Point):
                yield point

    def _opened_table(self, name: str) -> pq.ParquetFile:
        return pq.ParquetFile(self.path / f"{name}.parquet", page_checksum_verification=True)

    def _table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        with self._opened_table(name) as file:
            return file.read(columns, use_threads=False)

    def _rows(self, name: str, columns: list[str] | None, first: int, end: int) -> pa.Table:
        """Return the rows from `first` up to, not including, `end`, and read only their row groups."""
        with self._opened_table(name) as file:
            groups = (file.metadata.row_group(number) for number in range(file.num_row_groups))
            ends = np.cumsum([group.num_rows for group in groups])
            wanted = range(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(ends, end, "left")) + 1)
            table = file.read_row_groups(list(wanted), columns, use_threads=False)
        begin = int(ends[wanted.start - 1]) if wanted.start else 0
        return table.slice(first - begin, end - first)

    def _columns(self, first: int, end: int) -> tuple[npt.NDArray[np.int32], Ints, npt.NDArray[np.int32]]:
        """Return runs, five to an event, args and ids of the events from `first` up to `end`."""
        if first == end:
            return np.empty((0, 5), np.int32), np.empty(0, np.int64), np.empty(0, np.int32)
        table = self._rows("events", ["kind", "kv_group", "request", "args", "hashes", "ids"], first, end)
        lists = [pa.concat_arrays(table[name].chunks) for name in ("args", "hashes", "ids")]
        n_args, n_hashes, n_ids = (np.diff(column.offsets.to_numpy()) for column in lists)
        others, hashes, ids = (column.flatten().to_numpy() for column in lists)
        is_hash = np.repeat(n_hashes > 0, n_args + n_hashes)
        args = np.empty(len(is_hash), np.int64)
        args[is_hash], args[~is_hash] = hashes, others
        counts = (n_args + n_hashes, n_ids)
        about = (_numbers(table["kind"]), table["kv_group"].to_numpy(), table["request"].to_numpy())
        return np.column_stack([*about, *counts]).astype(np.int32), args, ids

    def _keyframe(self, row: int) -> Keyframe:
        with self._opened_table("keyframes") as file:
            rows = file.read(columns=["row"])["row"].to_pylist()
            payload = file.read_row_group(rows.index(row), columns=["payload"])["payload"][0].as_py()
        frame = decode(payload)
        assert isinstance(frame, Keyframe)
        return frame


def _batch(row: dict[str, Any], runs: memoryview, args: memoryview, ids: memoryview) -> Batch:
    batch_columns = {name: row[name] for name in ("engine", "epoch", *_OF_BATCH)}
    return Batch(**batch_columns, texts=dict(row["texts"]), runs=runs, args=args, ids=ids)
