"""Two windows compared by the service say what `monitor diff` says of them, from memory or from history."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvscope.engine.bench.clock import VirtualClock
from kvscope.lab.stepped_engine import Lab
from kvscope.lab.stepped_recordings import recording_of
from kvscope.monitor.base.errors import BadQuestion, BadTime
from kvscope.monitor.base.text import timestamp
from kvscope.monitor.contract.journal import JournalWriter
from kvscope.monitor.contract.samples import Record
from kvscope.monitor.contract.wire import Batch, Frame, Keyframe, encode
from kvscope.monitor.history.history import History, Recordings
from kvscope.monitor.history.segment_files import keyframe_of
from kvscope.monitor.questions import recent_past
from kvscope.monitor.questions.client import ServiceClient
from kvscope.monitor.questions.comparison import MAX_WINDOW_S
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.recent_past import size_of
from kvscope.monitor.service.http_api import create_app
from kvscope.monitor.sources.recording import Recording
from kvscope.monitor.terminal.cli import main
from tests.detectors.scenes import ENGINE, Watched, finished_held
from tests.questions.test_past import folded, random_run
from tests.web.test_service import serving

OF_TOTALS = ("/s", "/min")
"""Units of the figures that an engine counts itself, so that they are known after a gap too."""


def kept(records: Sequence[Record], directory: Path) -> Path:
    """A recording of them."""
    first = records[0]
    assert isinstance(first, Batch | Keyframe)
    with_end = JournalWriter(directory, first.epoch)
    for record in records:
        assert isinstance(record, Batch | Keyframe)
        with_end.append(encode(record), record.sequence)
    with_end.close()
    return directory


def diff(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """What the command prints."""
    capsys.readouterr()
    main(["diff", "--format", "json", *map(str, arguments)])
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def figures(reported: dict[str, Any]) -> dict[str, Any]:
    return {row["name"]: row for row in reported["metrics"]}


def codes(reported: dict[str, Any]) -> dict[str, Any]:
    """What became of each code, and how many of it there were."""
    return {row["code"]: (row["status"], row["before"], row["after"]) for row in reported["findings"]}


def asked(watch: Pipeline, *arguments: str) -> dict[str, Any]:
    """The answer as JSON."""
    reported: dict[str, Any] = json.loads(msgspec.json.encode(watch.compare(*arguments)))
    return reported


def windows(recording: Path, count: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """With as long a time before them."""
    walls = [frame.wall_ns for frame in Recording(recording)]
    first, last = min(walls), max(walls)
    for _ in range(count):
        until_ns = rng.randrange(first + (last - first) // 4, last)
        since_ns = until_ns - rng.randrange((until_ns - first) // 4, (until_ns - first) // 2)
        yield timestamp(since_ns) or "", timestamp(until_ns) or ""


@pytest.mark.parametrize("seed", range(60, 63))
@pytest.mark.parametrize("losses", [False, True], ids=["whole", "gaps"])
def test_it_says_what_the_command_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, losses: bool
) -> None:
    monkeypatch.setattr(recent_past, "MIN_BETWEEN", 4_000)  # so that a short life has many states to begin from
    monkeypatch.setattr(recent_past, "MAX_BETWEEN", 4_000)
    lab, records = random_run(seed, 150, losses=losses)
    recording = kept(records, tmp_path / "run")
    engine = lab.packer.engine
    from_memory, from_disk = Pipeline(), Pipeline(history=History(recording))
    from_memory.feed(records)
    for since, until in windows(recording, 4, random.Random(seed)):
        expected = figures(diff(capsys, recording, "--window", f"{since}..{until}"))
        for watch in (from_memory, from_disk):
            reported = figures(asked(watch, engine, since, until))
            if losses:  # how long who waited, and which block stayed, is not known of where something is missing
                reported, known = (
                    {name: row[name] for name in row if row[name]["unit"] in OF_TOTALS} for row in (reported, expected)
                )
                assert reported == known
            else:
                assert reported == expected


def test_a_window_that_begins_on_disk_and_ends_in_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of a service that was started again meanwhile."""
    lab, records = random_run(64, 150, losses=False)
    recording = kept(records, tmp_path / "run")
    half = len(records) // 2
    joined = keyframe_of(folded(records[:half]))
    assert joined is not None
    watch = Pipeline(history=History(recording))
    watch.feed([joined, *records[half:]])
    since, until = (timestamp(joined.wall_ns + s * 10**9) or "" for s in (-1, 1))
    reported = asked(watch, lab.packer.engine, since, until)
    assert figures(reported) == figures(diff(capsys, recording, "--window", f"{since}..{until}"))


def test_what_was_counted_before_a_recording_began_is_not_of_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lab = Lab()
    for n in range(30):
        lab.arrive(10 + n, max_tokens=8)
        lab.step(0.2)
    lab.run_until_idle()
    lab.flush()
    half = len(lab.frames) // 2
    joined = keyframe_of(folded(lab.frames[:half]))
    assert joined is not None
    whole, late = kept(lab.frames, tmp_path / "whole"), kept([joined, *lab.frames[half:]], tmp_path / "late")
    reported = diff(capsys, whole, late)
    rest = folded(lab.frames).state.totals.output_tokens - folded(lab.frames[:half]).state.totals.output_tokens
    assert 0 < rest == reported["after"]["counts"]["output_tokens"] < reported["before"]["counts"]["output_tokens"]


def test_of_two_recordings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of one engine at different times, as a service shows them together."""
    for name, faults in (("monday", False), ("friday", True)):
        scene = finished_held() if faults else Watched()
        scene.live(12)
        later_ns = 86_400 * 10**9 * faults
        kept([replace(frame, wall_ns=frame.wall_ns + later_ns) for frame in scene.lab.frames], tmp_path / name)
    runs = (tmp_path / "monday", tmp_path / "friday")
    together = Recordings(runs)
    watch = Pipeline(history=together)
    monday, friday = together.named
    for engine, directory in together.named.items():
        watch.feed(replace(frame, engine=engine) for frame in Recording(directory))
    spans = {engine: watch.history(engine) for engine in together.named}
    whole = [(spans[engine].first or "", spans[engine].last or "") for engine in (friday, monday)]
    reported = asked(watch, friday, *whole[0], monday, *whole[1])
    expected = diff(capsys, *runs, "--window", "..".join(whole[1]), "--window", "..".join(whole[0]))
    assert figures(reported) == figures(expected)
    assert codes(reported) == codes(expected)
    assert codes(reported)["leak.finished-held"][0] == "added"
    # Where no window is named, all of both: the one was not there when the other was.
    by_itself = watch.compare(friday, other=monday)
    assert [side.engine for side in (by_itself.before, by_itself.after)] == [monday, friday]
    assert by_itself.before.until == spans[monday].last
    assert watch.compare(monday, other=friday).before.until == spans[friday].last
    assert watch.compare(monday, other=friday).is_worse is False


def test_an_engine_that_was_started_again_in_the_window(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, again = Lab(engine=ENGINE), Lab(engine=ENGINE, clock=VirtualClock())
    records: list[Record] = []
    for lab, later_s in ((first, 0), (again, 60)):
        lab.clock.sleep(later_s)  # type: ignore[attr-defined]
        lab.packer.epoch = lab.clock.time_ns()
        for n in range(8):
            lab.arrive(10 + n, max_tokens=20)
            lab.step(0.5)
        lab.run_until_idle()
        records += [
            replace(frame, epoch=lab.packer.epoch, wall_ns=max(frame.wall_ns, lab.packer.epoch))
            for frame in lab.flush() or lab.frames
        ]
    watch = Pipeline()
    watch.feed(records)
    assert watch.engines()[0].restarts == 1
    recording = kept(records, tmp_path / "run")
    walls = [record.wall_ns for record in records if isinstance(record, Batch)]
    since, until = (timestamp(at_ns) or "" for at_ns in (walls[0] + 2 * 10**9, walls[-1]))
    reported = asked(watch, ENGINE, since, until)
    assert figures(reported) == figures(diff(capsys, recording, "--window", f"{since}..{until}"))
    assert reported["after"]["counts"]["served"] > 8


def leaking() -> Watched:
    scene = finished_held()
    scene.live(30)
    return scene


def test_windows_that_are_not_named() -> None:
    """As long a time just before the first; and without a first, the later half of what is known."""
    scene = leaking()
    watch, now_ns = scene.watch, scene.now_ns
    since, until = (timestamp(now_ns - ago_s * 10**9) or "" for ago_s in (10, 5))
    reported = watch.compare(ENGINE, since, until)
    before = timestamp(now_ns - 15 * 10**9) or ""
    assert reported == watch.compare(ENGINE, since, until, ENGINE, before, since)
    assert reported.before.until is not None
    assert before <= (reported.before.since or "") < reported.before.until <= since <= (reported.after.since or "")
    by_itself = watch.compare(ENGINE)
    assert by_itself.before.seconds == pytest.approx(by_itself.after.seconds, abs=1)
    assert by_itself.before.since == watch.history(ENGINE).first


def test_what_cannot_be_compared() -> None:
    scene = leaking()
    watch = scene.watch
    last = timestamp(scene.now_ns) or ""
    long_ago = ("2001-02-03T04:00:00Z", "2001-02-03T04:30:00Z")
    day = timestamp(scene.now_ns - 86_400 * 10**9) or ""
    for arguments, says in (
        (long_ago, "nothing is kept of .*: what is begins at .* and ends at"),
        (("2100-01-01T00:00:00Z", "2100-01-01T00:10:00Z"), f"what is ends at {last}"),
        ((last, long_ago[0]), "nothing of"),
        ((day,), r"24 h is too long to be measured: ask for 1 h at most"),
        (("", "", "", *long_ago), "nothing is kept of"),
        (("noon",), "is not a time"),
    ):
        with pytest.raises(BadTime, match=says):
            watch.compare(ENGINE, *arguments)
    assert MAX_WINDOW_S == 3600


def test_so_much_is_not_gone_through_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = leaking()
    reported = scene.watch.compare(ENGINE)
    received = sum(size_of(frame) for frame in scene.lab.frames if isinstance(frame, Batch))
    monkeypatch.setattr("kvscope.monitor.questions.past.MAX_WINDOW_BYTES", received // 10)
    assert scene.watch.compare(ENGINE) == reported, "what was measured is kept"
    with pytest.raises(BadQuestion, match=r"there are too many events: ask until .* or less"):
        scene.watch.compare(
            ENGINE, reported.before.since or "", reported.after.until or "", ENGINE, reported.before.since or ""
        )


def test_a_window_that_begins_before_anything_was_heard_is_what_there_is_of_it() -> None:
    scene = leaking()
    first_ns = scene.lab.frames[0].wall_ns
    since, until, later = (timestamp(first_ns + s * 10**9) or "" for s in (-20, 4, 8))
    reported = scene.watch.compare(ENGINE, until, later, "", since, until)
    assert reported.before.since == timestamp(first_ns)


def test_over_http() -> None:
    scene = leaking()
    window = [timestamp(scene.now_ns - ago_s * 10**9) or "" for ago_s in (10, 1)]
    with serving(create_app(scene.watch, list)) as url:
        remote = ServiceClient(url)
        try:
            assert remote.compare(ENGINE, *window) == scene.watch.compare(ENGINE, *window)
            with pytest.raises(BadTime, match="too long"):
                remote.compare(ENGINE, "2001-02-03T04:05:06Z")
        finally:
            remote.close()


class SlowHistory(History):
    """Hands out what it has kept when it may."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.asked = threading.Event()
        self.may_answer = threading.Event()

    def tail(self, engine: str, since_ns: int) -> Iterator[Frame]:
        self.asked.set()
        assert self.may_answer.wait(30)
        return super().tail(engine, since_ns)


def test_nobody_waits_for_a_comparison_but_who_asked_for_it(tmp_path: Path) -> None:
    lab, _ = random_run(5, 80, losses=False)
    engine, frames = lab.packer.engine, list(lab.frames)
    history = SlowHistory(recording_of(lab, tmp_path))
    watch = Pipeline(history=history)
    reported: list[float] = []
    asking = threading.Thread(target=lambda: reported.append(watch.compare(engine).after.seconds))
    asking.start()
    try:
        assert history.asked.wait(30)
        watch.feed(frames)
        assert [view.engine for view in watch.engines()] == [engine]
        watch.findings()
        assert reported == []
    finally:
        history.may_answer.set()
        asking.join()
    assert len(reported) == 1
