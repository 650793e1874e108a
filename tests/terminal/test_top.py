"""`monitor top`, driven by keys, over a real stream and over recordings."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import termios
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import pytest

textual = pytest.importorskip("textual", reason="monitor top is drawn by textual: pip install '.[monitor]'")

from textual.pilot import Pilot  # noqa: E402 - after the skip
from textual.widgets import DataTable  # noqa: E402

from kvscope.lab.recorded_pages import rows, scraped  # noqa: E402
from kvscope.lab.stepped_recordings import healthy_lab, leaking_lab  # noqa: E402
from kvscope.monitor.detectors.detector import Settings  # noqa: E402
from kvscope.monitor.questions.pipeline import Pipeline  # noqa: E402
from kvscope.monitor.terminal.cli import main  # noqa: E402
from kvscope.monitor.terminal.top_screen import EventHistoryScreen, Looker, Top  # noqa: E402
from kvscope.monitor.terminal.watch_mode import open_live  # noqa: E402
from tests.terminal.screen import SIZE, Still, drive, screen_of, shown, until  # noqa: E402
from tests.web.parts import Engine  # noqa: E402

LIVE = "live@127.0.0.1:0/0"


def test_a_stream_goes_by(tmp_path: Path) -> None:
    with (
        Engine(tmp_path, LIVE, total=101, block_size=16) as engine,
        closing(open_live(engine.events, Settings(), 10.0, "")) as live,
    ):
        looker = Looker(live)
        looker.start()
        try:
            drive(looker, _look_at_a_stream)
        finally:
            looker.stop()


def _shows(app: Top, words: str) -> bool:
    return words in screen_of(app)


async def _look_at_a_stream(app: Top, pilot: Pilot[None]) -> None:
    table = app.query_one(DataTable)
    for words in (LIVE, "serving", "in use", "requests live or hold blocks, by blocks held", "RUNNING"):
        await until(pilot, partial(_shows, app, words))
    step = app.looker.view.engines[0].step if app.looker.view else None
    await until(pilot, lambda: app.looker.view is not None and app.looker.view.engines[0].step != step)
    await pilot.press("s")
    await until(pilot, lambda: "by time in state" in screen_of(app))
    await until(pilot, lambda: table.row_count)
    await pilot.press("enter")
    await until(pilot, lambda: isinstance(app.screen, EventHistoryScreen))
    await until(pilot, lambda: f" on {LIVE}" in screen_of(app))
    await pilot.press("escape")
    assert not isinstance(app.screen, EventHistoryScreen)


def test_two_engines_and_what_is_wrong_with_one() -> None:
    watch = Pipeline()
    for name, lab in (("healthy@127.0.0.1:1/0", healthy_lab()), ("leaking@127.0.0.1:2/0", leaking_lab())):
        watch.feed(msgspec.structs.replace(frame, engine=name) for frame in lab.frames)
    looker = Looker(Still(watch))
    looker.start()

    async def look(app: Top, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "1 finding of other engines" in screen_of(app))
        assert "leak.finished-held" not in screen_of(app)
        await pilot.press("e")
        await until(pilot, lambda: "leak.finished-held" in screen_of(app))
        assert "req-3" in screen_of(app)
        assert max(map(len, screen_of(app).splitlines())) <= SIZE[0]

    try:
        drive(looker, look)
    finally:
        looker.stop()


def test_an_engine_known_by_its_figures_alone() -> None:
    watch = Pipeline()
    watch.feed(scraped(rows("never-freed")[:2]))
    seen = shown(watch)
    assert "0.0 % in use" in seen
    assert "0 requests live or hold blocks" in seen


def test_in_a_terminal_until_q(tmp_path: Path) -> None:
    with Engine(tmp_path, LIVE, total=101, block_size=16) as engine:
        primary, secondary = pty.openpty()
        termios.tcsetwinsize(secondary, (SIZE[1], SIZE[0]))
        command = [sys.executable, "-m", "kvscope.monitor", "top", engine.events]
        with subprocess.Popen(command, stdin=secondary, stdout=secondary, stderr=secondary) as process:
            os.close(secondary)
            too_long = threading.Timer(60, process.kill)
            too_long.start()
            drawn = b""
            while LIVE.encode() not in drawn:
                drawn += os.read(primary, 65536)
            os.write(primary, b"q")
            with contextlib.suppress(OSError):  # the other side has closed
                while os.read(primary, 65536):
                    pass
            assert process.wait() == 0
            too_long.cancel()
            too_long.join()
        os.close(primary)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [(["tests/data/seed-000.log"], 2, "terminal"), (["ipc:///nobody", "--timeout", "0.1"], 2, "--watch")],
)
def test_without_a_terminal(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str) -> None:
    assert main(["top", *arguments]) == code
    assert says in capsys.readouterr().err
