"""A trace of a recording: it keeps the rules of Perfetto's format, and says what the ledger and the findings say."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent
from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

from kvscope.lab.stepped_engine import Lab
from kvscope.lab.stepped_recordings import leaking_lab, recording_of
from kvscope.monitor.contract.kinds import FIRST_FINISHED
from kvscope.monitor.contract.wire import Keyframe
from kvscope.monitor.ledger.event_history import phase_names, phases, scan_events
from kvscope.monitor.outputs.perfetto_trace import TRACE_HOLDERS
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.terminal import cli


def preempting_lab() -> Lab:
    """Too many requests for the pool, all of them done in the end."""
    lab = Lab(total=33, block_size=4, seed=3)
    for n in range(8):
        lab.arrive(20, max_tokens=30, name=f"req-{n}")
        lab.step()
    lab.run_until_idle()
    return lab


LABS = {"leaking": leaking_lab, "preempting": preempting_lab}


@pytest.fixture(scope="module", params=LABS)
def lab(request: pytest.FixtureRequest) -> Lab:
    made: Lab = LABS[request.param]()
    return made


@pytest.fixture(scope="module")
def file(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    assert cli.main(["export", str(recording_of(lab, folder / "recording")), str(folder / "trace.pftrace")]) == 0
    return folder / "trace.pftrace"


@pytest.fixture(scope="module")
def watch(lab: Lab) -> Pipeline:
    watch = Pipeline()
    watch.feed(lab.frames)
    watch.settle()
    return watch


class Read:
    """A trace read back: tracks by number, and what is on each, in the order of the file."""

    def __init__(self, path: Path) -> None:
        self.trace = Trace()
        assert self.trace.ParseFromString(path.read_bytes()) == path.stat().st_size
        self.tracks: dict[int, Any] = {}
        self.events: dict[int, list[tuple[int, Any]]] = defaultdict(list)
        for packet in self.trace.packet:
            if packet.HasField("track_descriptor"):
                described = packet.track_descriptor
                assert described.uuid not in self.tracks
                assert not described.parent_uuid or described.parent_uuid in self.tracks
                self.tracks[described.uuid] = described
            elif packet.HasField("track_event"):
                assert packet.track_event.track_uuid in self.tracks, "a track is described before it is used"
                self.events[packet.track_event.track_uuid].append((packet.timestamp, packet.track_event))

    def under(self, group: str) -> Iterator[tuple[str, list[tuple[int, Any]]]]:
        """The tracks of a group, each with what is on it."""
        (parent,) = (number for number, track in self.tracks.items() if track.name == group)
        for number, track in self.tracks.items():
            if track.parent_uuid == parent:
                yield track.name, self.events[number]

    def on(self, name: str) -> list[Any]:
        """What is on the one track of that name."""
        (number,) = (number for number, track in self.tracks.items() if track.name == name)
        return [event for _, event in self.events[number]]


def arguments(event: Any) -> dict[str, Any]:
    return {
        one.name: one.string_value if one.HasField("string_value") else one.int_value for one in event.debug_annotations
    }


@pytest.fixture(scope="module")
def read(file: Path) -> Read:
    return Read(file)


def test_a_part_of_a_recording(lab: Lab, read: Read, tmp_path: Path) -> None:
    times = sorted(frame.wall_ns for frame in lab.frames)
    middle = times[len(times) // 2]
    out = tmp_path / "part.pftrace"
    since = datetime.fromtimestamp(middle / 1e9, UTC).isoformat()
    assert cli.main(["export", str(recording_of(lab, tmp_path / "recording")), str(out), "--since", since]) == 0
    part = Read(out)
    there = {name for name, on in read.under("Requests") if on[-1][0] >= middle}
    drawn = {name for name, _ in part.under("Requests")}
    assert there <= drawn < {name for name, _ in read.under("Requests")}
    ends = {name: on[-1] for name, on in read.under("Requests")}
    for name, on in part.under("Requests"):
        assert (on[-1][0], on[-1][1].type, on[-1][1].name) == (
            ends[name][0],
            ends[name][1].type,
            ends[name][1].name,
        )


def test_the_first_packet_clears_the_sequences_state_and_all_are_of_one_sequence(read: Read) -> None:
    first = read.trace.packet[0]
    assert first.sequence_flags == first.SEQ_INCREMENTAL_STATE_CLEARED
    assert {packet.trusted_packet_sequence_id for packet in read.trace.packet} == {first.trusted_packet_sequence_id}
    assert [clock.timestamp for clock in first.clock_snapshot.clocks] == [first.timestamp] * 2


def test_slices_of_a_track_begin_and_end_one_after_the_other(read: Read) -> None:
    for number, found in read.events.items():
        assert all(before <= after for (before, _), (after, _) in pairwise(found)), read.tracks[number].name
        kinds = [event.type for _, event in found]
        if TrackEvent.TYPE_SLICE_BEGIN in kinds:
            slices = [kind for kind in kinds if kind != TrackEvent.TYPE_INSTANT]
            assert slices == [TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END] * (len(slices) // 2)
        else:
            (kind,) = set(kinds)
            is_counter = read.tracks[number].HasField("counter")
            assert kind == (TrackEvent.TYPE_COUNTER if is_counter else TrackEvent.TYPE_INSTANT)


def test_each_request_is_a_track_with_the_phases_of_its_life(lab: Lab, watch: Pipeline, read: Read) -> None:
    ledger = watch.fleet.engines[lab.packer.engine]
    records = {record.id: record for record in (*ledger.ended, *ledger.state.requests.values())}
    drawn = dict(read.under("Requests"))
    assert set(drawn) == set(records)
    for name, found in drawn.items():
        number = records[name].number
        begun = [(at, event) for at, event in found if event.type != TrackEvent.TYPE_SLICE_END]
        lived = phases(scan_events(ledger.recent, number), number, ledger.now_ns)
        assert [at for at, _ in begun] == [phase.since_ns for phase in lived]
        for (_, event), phase in zip(begun, lived, strict=True):
            stated = arguments(event)
            assert event.name == phase_names(phase)[0]
            assert (stated["computed"], stated["recomputed"]) == (phase.computed, phase.recomputed)
            if phase.status < FIRST_FINISHED:
                assert (stated.get("reason", ""), stated["blocks"]) == (phase_names(phase)[1], phase.blocks)


def test_what_ended_and_holds_blocks_is_drawn_until_it_gives_them_back(watch: Pipeline, read: Read) -> None:
    (balance,) = (engine.balance for engine in watch.engines())
    assert balance is not None
    until = max(packet.timestamp for packet in read.trace.packet)
    held = 0
    for _, found in read.under("Requests"):
        last = [event for _, event in found if event.type == TrackEvent.TYPE_SLICE_BEGIN][-1]
        if last.name.startswith("FINISHED") and found[-1][0] == until:
            assert arguments(last)["reason"] == "FREE_DEFERRED"
            held += arguments(last)["blocks"]
    assert held == balance.finished


def test_counters_are_the_ledgers_points_each_change_once(lab: Lab, watch: Pipeline, read: Read) -> None:
    points = watch.fleet.engines[lab.packer.engine].points
    series = {("KV blocks", name): [(p.at_ns, getattr(p.balance, name)) for p in points] for name in TRACE_HOLDERS}
    series["Queue", "running"] = [(point.at_ns, point.running) for point in points]
    series["Queue", "waiting"] = [(point.at_ns, point.waiting) for point in points]
    drawn = {(group, name): found for group in ("KV blocks", "Queue") for name, found in read.under(group)}
    assert set(drawn) == set(series)
    for name, values in series.items():
        changes = values[:1] + [after for before, after in pairwise(values) if after[1] != before[1]]
        assert [(at, event.counter_value) for at, event in drawn[name]] == changes


def test_findings_are_instants_with_what_they_say_when_they_begin(lab: Lab, read: Read) -> None:
    watch, transitions = Pipeline(), []
    for frame in lab.frames:
        watch.feed([frame])
        transitions += [(finding.report(), to) for finding, to, _ in watch.take_transitions()]
    watch.settle()
    transitions += [(finding.report(), to) for finding, to, _ in watch.take_transitions()]
    reported = {report.code: report for report, to in transitions if to == "firing"}
    shown = {event.name: arguments(event) for event in read.on("Findings") if not event.name.endswith(" resolved")}
    assert set(shown) == set(reported)
    for code, stated in shown.items():
        assert (stated["severity"], stated["runbook"]) == (reported[code].severity, reported[code].runbook)
    assert ("leak.finished-held" in shown) == (lab.connector is not None)


def test_a_stream_that_is_joined_in_the_middle_draws_who_is_there(tmp_path: Path) -> None:
    lab = leaking_lab()
    keyframe: Keyframe = lab.keyframe()
    before = len(lab.frames)
    for _ in range(10):
        lab.step(seconds=0.5)
    joined = Lab(seed=9)
    joined.frames = [keyframe, *lab.frames[before:]]
    recording = recording_of(joined, tmp_path / "recording")
    assert cli.main(["export", str(recording), str(tmp_path / "trace")]) == 0
    drawn = dict(Read(tmp_path / "trace").under("Requests"))
    assert set(drawn) == {lab.scheduler.requests[number].id for number in lab.scheduler.deferred}


def test_trace_processor_answers_sql(file: Path, watch: Pipeline) -> None:
    shell = shutil.which("trace_processor_shell") or shutil.which("trace_processor")
    if shell is None:
        pytest.skip("trace_processor_shell is not on the PATH: Perfetto's releases have it, and no package does")
    requests = {request.id for engine in watch.engines() for request in watch.requests(engine.engine)}
    with TraceProcessor(str(file), config=TraceProcessorConfig(bin_path=shell)) as processor:
        tracks = processor.query("select distinct track.name from slice join track on slice.track_id = track.id")
        assert {row.name for row in tracks} >= requests
        (errors,) = processor.query("select sum(value) as n from stats where severity in ('error', 'data_loss')")
        assert errors.n == 0


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("http://127.0.0.1:9", "a file of every event needs the event stream"),
        ("tests/data/seed-000.log", "a file of every event needs the event stream"),
        ("no/such/thing", "there is no such file"),
    ],
)
def test_what_cannot_be_exported_is_told_with_the_remedy(
    target: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", target, str(tmp_path / "trace")]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_and_a_stream_that_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = str(recording_of(preempting_lab(), tmp_path / "recording"))
    assert cli.main(["export", recording, str(tmp_path / "none" / "trace")]) == 2
    assert "Name another file" in capsys.readouterr().err
    assert cli.main(["export", f"ipc://{tmp_path}/silent", str(tmp_path / "trace"), "--timeout", "0.2"]) == 3
    assert "no message arrived" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"recording"}
