"""What reads input from elsewhere, each with real input: `read` takes a damaged one and names what came of it.

A reader may refuse an input by its own error. Whatever else it raises escapes `read`.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvscope.monitor.base.errors import BadTarget, CannotTell, ContractError, KvscopeError
from kvscope.monitor.base.text import timestamp
from kvscope.monitor.contract.samples import KvEvents
from kvscope.monitor.contract.wire import decode as decode_frame
from kvscope.monitor.contract.wire import encode
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.history.history import History
from kvscope.monitor.history.sealed_segment import write_tables
from kvscope.monitor.history.sql_query import BadQuery, SqlSource
from kvscope.monitor.history.sql_tables import with_answer
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.questions.observe import kv_events_in_words, observe
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.query import QUESTIONS
from kvscope.monitor.sources.kv_event_stream import NotKvEvents, decode_kv_events
from kvscope.monitor.terminal.cli import main

from ..kv_publisher import encoded, recorded
from ..stepped_engine import Lab
from ..stepped_recordings import recording_of
from . import mutations
from .mutations import INPUT_BYTES, LARGE_BYTES

DATA: Final = Path(__file__).parents[2] / "tests" / "data"
SEGMENT: Final = f"{1:020d}-{0:015d}.kvj"
COMMAND_EVERY: Final = 50
"""One file in so many goes through `monitor doctor` too."""


class ContainedFailure(AssertionError):
    """A detector or another part raised, which the pipeline contained."""


class WrongExit(AssertionError):
    """A command ended as no command should."""


class FuzzTarget:
    """A reader with real input. `outcomes`: what has to come of some of the damaged inputs."""

    outcomes: frozenset[str] = frozenset()

    def __init__(self, folder: Path, recordings: Sequence[bytes] = ()) -> None:
        """folder: the target's own, to write to; recordings: segments beside those of the lab."""
        self.folder = folder
        self.recordings = recordings
        self.inputs: list[bytes] = []

    def damaged(self, rng: random.Random) -> bytes:
        """Return one of the inputs, damaged."""
        return mutations.damaged_bytes(self.inputs, rng)

    def large(self, rng: random.Random) -> bytes:
        """Return inputs together, of 2 MiB, damaged."""
        return mutations.damaged_bytes([_repeated(self.inputs, rng)], rng, LARGE_BYTES)

    def read(self, content: bytes) -> str:
        """Read it, and judge it."""
        raise NotImplementedError

    def close(self) -> None:
        """Close what it opened."""


def _repeated(inputs: Sequence[bytes], rng: random.Random) -> bytes:
    parts: list[bytes] = []
    while sum(map(len, parts)) < LARGE_BYTES:
        parts.append(rng.choice(inputs))
    return b"".join(parts)[:LARGE_BYTES]


def lab_recordings() -> list[list[bytes]]:
    """Return the frames of short simulated runs: healthy, with connectors, with a leak, with restarts."""
    kinds: list[dict[str, Any]] = [
        {"total": 60, "block_size": 16},
        {"total": 60, "block_size": 16, "connector_share": 0.6, "load_share": 0.3},
        {"total": 60, "connector_share": 1.0, "faults": ["leak.finished-held:after=3:limit=4"]},
    ]
    found = []
    for seed, kind in enumerate(kinds):
        lab = Lab(**kind, seed=seed)
        for step in range(16):
            if step % 2:
                lab.arrive(lab.rng.randint(1, 60), max_tokens=lab.rng.randint(1, 12))
            lab.step(seconds=0.3)
            if step % 8 == 5:
                lab.heartbeat()
                lab.frames.append(lab.keyframe())
        found.append([encode(frame) for frame in lab.frames])
    return found


def ask_everything(pipeline: Pipeline) -> None:
    """Ask every question about each engine: about now, the midst of what is known of it, and its last position.

    Raises ContainedFailure for what the pipeline contained.
    """
    pipeline.settle()
    for ledger in list(pipeline.fleet.engines.values()):
        first_ns = ledger.points[0].at_ns if ledger.points else ledger.now_ns
        midst = timestamp((first_ns + ledger.now_ns) // 2) or ""
        for question in QUESTIONS.values():
            fields = question.parameters.__struct_fields__
            for moment in ("", midst, str(ledger.position())) if {"at", "until"} & set(fields) else ("",):
                for given in _given(ledger, moment):
                    if question.name == "block":
                        given["id"] = 1
                    with contextlib.suppress(KvscopeError):
                        pipeline.answer(question, {name: given[name] for name in fields if name in given})
    refuse_contained(pipeline)


def _given(ledger: EngineLedger, moment: str) -> Iterator[dict[str, Any]]:
    """Yield arguments, by the names that questions give them: about a request that lives, and about one that ended."""
    for records in (ledger.state.requests.values(), reversed(ledger.ended)):
        record = next(iter(records), None)
        number = record.number if record is not None else 1
        yield {"engine": ledger.engine, "id": f"#{number}", "at": moment, "until": moment, "by": "prefix"} | {
            "finding": "none",
            "prompt_tokens": 100,
            "max_tokens": 10,
        }


def refuse_contained(pipeline: Pipeline) -> None:
    """Raise ContainedFailure if a part of the pipeline failed."""
    failures = pipeline.supervisor.failures()
    if failures:
        raise ContainedFailure("; ".join(f"{failure.worker}: {failure.error}" for failure in failures))


class FrameTarget(FuzzTarget):
    """A frame of an event stream, between those of a sound one."""

    outcomes = frozenset(("read", "ContractError", "skipped"))

    def __init__(self, folder: Path, recordings: Sequence[bytes] = ()) -> None:
        super().__init__(folder, recordings)
        self._runs = [run[:12] for run in lab_recordings()]
        self.inputs = [frame for run in self._runs for frame in run]
        self.inputs += [frame for segment in recordings for frame in mutations.records_in(segment)[:50]]

    def damaged(self, rng: random.Random) -> bytes:
        return mutations.damaged_frame(self.inputs, rng)[:INPUT_BYTES]

    def read(self, content: bytes) -> str:
        try:
            frame = decode_frame(content)
        except ContractError:
            return "ContractError"
        if frame is None:
            return "skipped"
        pipeline = Pipeline()
        run = self._runs[len(content) % len(self._runs)]
        for each in (*map(decode_frame, run[:6]), frame, *map(decode_frame, run[6:9])):
            if each is not None:
                pipeline.feed([each])
        ask_everything(pipeline)
        return "read"


class FileTarget(FuzzTarget):
    """A file that `doctor` reads."""

    name = "input"

    def __init__(self, folder: Path, recordings: Sequence[bytes] = ()) -> None:
        super().__init__(folder, recordings)
        self.path = folder / self.name
        self._count = 0

    def read(self, content: bytes) -> str:
        self.path.write_bytes(content)
        return self.judge(str(self.path))

    def judge(self, target: str) -> str:
        """Observe a target, and run `doctor` on one in COMMAND_EVERY."""
        self._count += 1
        if self._count % COMMAND_EVERY == 0:
            run_doctor(target)
        try:
            observation = observe(target, Settings())
        except (CannotTell, BadTarget) as error:
            if not str(error).startswith(str(self.folder)):
                raise AssertionError(f"an error that does not name its target: {error}") from error
            return type(error).__name__
        observation.query.engines()
        observation.query.findings()
        assert isinstance(observation.query, Pipeline)
        refuse_contained(observation.query)
        return str(observation.kind)


def run_doctor(target: str) -> None:
    """Run `monitor doctor`. Raises WrongExit for a code that is none of its own, or 1 without a finding."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["doctor", target, "--format", "json"])
    if code not in (0, 1, 2, 3) or "Traceback" in err.getvalue():
        raise WrongExit(f"exit code {code}: {err.getvalue()[-500:]}")
    if code == 1 and not json.loads(out.getvalue())["findings"]:
        raise WrongExit("exit code 1 without a finding")


class JournalTarget(FileTarget):
    """A recording of one segment."""

    outcomes = frozenset(("recording", "CannotTell"))

    def __init__(self, folder: Path, recordings: Sequence[bytes] = ()) -> None:
        super().__init__(folder, recordings)
        self.inputs = [*map(mutations.segment_of, lab_recordings()), *recordings]
        self.path = folder / "run" / SEGMENT
        self.path.parent.mkdir()

    def damaged(self, rng: random.Random) -> bytes:
        return mutations.damaged_segment(self.inputs, rng)

    def large(self, rng: random.Random) -> bytes:
        payloads = [payload for segment in self.inputs for payload in mutations.records_in(segment)]
        many = [rng.choice(payloads) for _ in range(LARGE_BYTES // (sum(map(len, payloads)) // len(payloads)))]
        return mutations.damaged_segment([mutations.segment_of(many)], rng, LARGE_BYTES)

    def read(self, content: bytes) -> str:
        self.path.write_bytes(content)
        return self.judge(str(self.path.parent))


class HistoryTarget(FuzzTarget):
    """A service's history: an open segment and the Parquet files of a closed one, of which one is damaged."""

    outcomes = frozenset(("read",))
    SQL_EVERY: Final = 20

    def __init__(self, folder: Path, recordings: Sequence[bytes] = ()) -> None:
        super().__init__(folder, recordings)
        self._sound = folder / "sound"
        runs = lab_recordings()
        engine = self._sound / "lab@127.0.0.1:0"
        engine.mkdir(parents=True)
        (engine / f"{1:020d}-{0:015d}.kvj").write_bytes(mutations.segment_of(runs[0]))
        assert write_tables(engine / f"{1:020d}-{0:015d}.kvj", engine) is not None
        (engine / f"{1:020d}-{0:015d}.kvj").unlink()
        (engine / f"{2:020d}-{0:015d}.kvj").write_bytes(mutations.segment_of(runs[1]))
        self._files = sorted(path.relative_to(self._sound) for path in self._sound.rglob("*") if path.is_file())
        self.inputs = [(self._sound / path).read_bytes() for path in self._files]
        self._count = 0

    def damaged(self, rng: random.Random) -> bytes:
        """Return the file's number and its new content."""
        number = rng.randrange(len(self._files))
        others = self.inputs if rng.random() < 0.1 else [self.inputs[number]]
        if self._files[number].suffix == ".kvj":
            return bytes([number]) + mutations.damaged_segment(others[:1], rng)
        return bytes([number]) + mutations.damaged_bytes(others, rng)

    def large(self, rng: random.Random) -> bytes:
        number = rng.randrange(len(self._files))
        return bytes([number]) + self.inputs[number] + _repeated(self.inputs, rng)

    def read(self, content: bytes) -> str:
        self._count += 1
        directory = self.folder / "history"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(self._sound, directory)
        (directory / self._files[content[0] % len(self._files)]).write_bytes(content[1:])
        history = History(directory)
        for engine in history.engines():
            try:
                span = history.span(engine)
                history.points(engine, 0, 1 << 62)
                if span is not None:
                    history.ledger_at(engine, span.to_ns)
                    history.ledger_at(engine, (span.from_ns + span.to_ns) // 2)
                for _ in history.batches(engine, 0, 1 << 62):
                    pass
                for _ in history.notes(engine, 0, 1 << 62):
                    pass
                history.last_ns(engine)
            except KvscopeError as error:
                return type(error).__name__
        if self._count % self.SQL_EVERY == 0:
            self._ask_sql(directory)
        return "read"

    def _ask_sql(self, directory: Path) -> None:
        for table in ("events", "points"):
            with contextlib.suppress(BadQuery):
                with_answer(f"SELECT * FROM {table}", SqlSource(directory), lambda found: sum(1 for _ in found.rows))


class BundleTarget(FileTarget):
    """A support bundle."""

    name = "input.zip"
    outcomes = frozenset(("bundle", "NotABundle", "CannotTell"))

    def __init__(self, folder: Path, recordings: Sequence[bytes] = ()) -> None:
        super().__init__(folder, recordings)
        lab = Lab(total=60)
        for _ in range(30):
            lab.arrive(12, max_tokens=4)
            lab.step(seconds=0.3)
        run = recording_of(lab, folder / "bundled")
        if main(["bundle", str(run), str(folder / "sound.zip")]):
            raise WrongExit("no bundle was made")
        self.inputs = [(folder / "sound.zip").read_bytes()]

    def damaged(self, rng: random.Random) -> bytes:
        return mutations.damaged_archive(self.inputs, rng)

    def large(self, rng: random.Random) -> bytes:
        return mutations.damaged_archive(self.inputs, rng, LARGE_BYTES)


class LogTarget(FileTarget):
    """A log, plain or packed."""

    name = "input.log"
    outcomes = frozenset(("log", "CannotTell", "BadTarget"))

    def __init__(self, folder: Path, recordings: Sequence[bytes] = ()) -> None:
        super().__init__(folder, recordings)
        packed = [path.read_bytes() for path in sorted(DATA.glob("*.log.gz"))]
        plain = [b"".join(gzip.decompress(data).splitlines(True)[-150:]) for data in packed]
        plain += [path.read_bytes() for path in sorted(DATA.glob("*.log"))]
        self.inputs = (plain + _reports()) * 3 + packed


class ReportTarget(FileTarget):
    """What people wrote of an incident."""

    name = "input.txt"
    outcomes = frozenset(("prose", "CannotTell"))

    def __init__(self, folder: Path, recordings: Sequence[bytes] = ()) -> None:
        super().__init__(folder, recordings)
        self.inputs = [(DATA / name).read_bytes() for name in ("seed-001.txt", "seed-002.log")] + _reports()


def _reports() -> list[bytes]:
    return [path.read_bytes() for path in sorted(DATA.glob("reports/*/report.txt"))]


class KvEventsTarget(FuzzTarget):
    """A batch of vLLM's KV events."""

    outcomes = frozenset(("read", "NotKvEvents"))

    def __init__(self, folder: Path, recordings: Sequence[bytes] = ()) -> None:
        super().__init__(folder, recordings)
        self.inputs = [encoded(batch, wire) for batch in recorded("kv-events") for wire in ("arrays", "maps")]

    def read(self, content: bytes) -> str:
        try:
            at_ns, events, rank = decode_kv_events(content)
        except NotKvEvents as error:
            return "NotKvEvents" if str(error) else "unnamed"
        pipeline = Pipeline()
        pipeline.feed([KvEvents(f"vllm@here/{rank % 4}", "1", at_ns, events)])
        ask_everything(pipeline)
        assert kv_events_in_words(pipeline.fleet.engines.values())
        return "read"
