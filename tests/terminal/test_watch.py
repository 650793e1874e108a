"""`monitor doctor --watch`: only changes are told, until Ctrl-C."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvscope.lab.recorded_pages import page, rows
from kvscope.lab.recorded_pages import served as pages
from kvscope.monitor.detectors.findings import Culprits, FindingReport
from kvscope.monitor.terminal import report_table
from kvscope.monitor.terminal.cli import main
from kvscope.monitor.terminal.watch_mode import GROWS_BY, Changes
from tests.detectors.scenes import finished_held
from tests.test_api import served as api
from tests.web.parts import Engine

LIVE = "live@127.0.0.1:0/0"


def finding(requests: int, **fields: Any) -> FindingReport:
    made = FindingReport(
        id="1",
        code="leak.finished-held",
        title="",
        severity="error",
        verdict="likely",
        state="firing",
        engine="e",
        since=None,
        position="",
        resolved_at=None,
        culprits=Culprits([f"r-{n}" for n in range(requests)], []),
        evidence=[],
        explanation="",
        do_now=[],
        change=[],
        wont_help=[],
        missing="",
        runbook="",
    )
    return msgspec.structs.replace(made, **fields)


def test_what_is_worth_a_word() -> None:
    changes = Changes()

    def reported(*findings: FindingReport) -> list[str]:
        return [change.what for change in changes.since(findings, None)]

    over = {"state": "resolved", "resolved_at": "2026-01-31T14:02:11.000Z"}
    assert reported(finding(3, id="0", **over)) == []  # it was over before anyone looked
    assert reported(finding(3, state="pending")) == []
    assert reported(finding(3)) == ["fires"]
    assert reported(finding(3)) == reported(finding(3 * GROWS_BY - 1)) == []
    assert reported(finding(3 * GROWS_BY)) == ["grows"]
    assert reported(finding(3 * GROWS_BY, verdict="confirmed")) == ["grows"]
    assert reported(finding(7, verdict="confirmed"), finding(1, id="2")) == ["fires"]
    assert [each.id for each in changes.firing] == ["1", "2"]
    assert reported(finding(7, verdict="confirmed", **over), finding(1, id="2")) == ["resolved"]
    assert reported() == ["resolved"]  # another explains it now
    assert reported(finding(1, id="2")) == ["fires"]


@pytest.mark.slow
def test_a_stream_a_page_and_a_service_until_ctrl_c(tmp_path: Path) -> None:
    """A connector keeps blocks for long, and then gives them back; the page and the service show leaks throughout."""
    leak = finished_held("leak.finished-held:every=2")
    leak.live(15)
    with (
        Engine(tmp_path, LIVE, total=101, connector_share=1.0) as engine,
        pages(page(rows("never-freed")[-1])) as server,
        api(leak.watch) as url,
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "kvscope.monitor",
                "doctor",
                engine.events,
                server.url,
                url,
                "--watch",
                "--format",
                "json",
                "--set",
                "leak.finished-held.grace_s=0.3",
                "--set",
                "leak.finished-held.unseen_times=0",
                "--set",
                "leak.finished-held.lease_s=0.3",
                "--set",
                "leak.finished-held.starved_s=0.3",
            ],
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        too_long = threading.Timer(60, process.kill)
        too_long.start()
        connector = engine.lab.connector
        assert connector is not None
        connector.polls_needed = 1_000_000_000
        assert process.stdout is not None
        reported: list[tuple[str, str]] = []

        def until(what: str, engines: int) -> None:
            """That many engines were told of."""
            assert process.stdout is not None
            while len({engine for word, engine in reported if word == what}) < engines:
                change = json.loads(process.stdout.readline())
                if change["finding"]["code"] == "leak.finished-held":
                    reported.append((change["what"], change["finding"]["engine"]))

        until("fires", 3)

        def give_back() -> None:
            connector.polls_needed = 1
            connector.polls += 2_000_000_000

        engine.soon(give_back)
        until("resolved", 1)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 1
        too_long.cancel()
        too_long.join()
    assert {engine for word, engine in reported if word == "resolved"} == {LIVE}


def test_a_change_in_80_columns() -> None:
    leak = finished_held("leak.finished-held")
    leak.live(15)
    out = io.StringIO()
    (found,) = [found for found in leak.watch.findings() if found.code == "leak.finished-held"]
    for change in Changes().since([found], "2026-01-31T14:02:11.000Z"):
        report_table.change(change, Console(file=out, width=80))
    first, *others = out.getvalue().splitlines()
    assert first.startswith("14:02:11 fires     error leak.finished-held, likely, on ")
    assert max(map(len, (first, *others))) <= 80
    assert " ".join(" ".join(others).split()) == f"{found.explanation} Do now: {found.do_now[0]}"


@contextmanager
def watching(events: str) -> Iterator[subprocess.Popen[str]]:
    """A doctor that watches, once it has told that nothing comes."""
    command = [sys.executable, "-m", "kvscope.monitor", "doctor", events, "--watch", "--timeout", "0.5"]
    command += ["--format", "json", "--set", "leak.finished-held.grace_s=0.3"]
    command += ["--set", "leak.finished-held.unseen_times=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "no message arrived" in process.stderr.readline() + process.stderr.readline()
            yield process
        finally:
            process.kill()


def test_an_engine_that_is_silent_is_waited_for(tmp_path: Path) -> None:
    """It is frozen, or starts later, and what it does then is told."""
    with watching(f"ipc://{tmp_path}/events") as process:
        assert process.stdout is not None
        with Engine(tmp_path, LIVE, total=101, connector_share=1.0, faults=["leak.finished-held:every=2"]):
            change = json.loads(process.stdout.readline())
    assert (change["what"], change["finding"]["engine"]) == ("fires", LIVE)


def test_an_engine_that_never_comes_is_no_judgement(tmp_path: Path) -> None:
    with watching(f"ipc://{tmp_path}/events") as process:
        process.send_signal(signal.SIGINT)
        assert "no message arrived" in process.communicate()[1]
        assert process.returncode == 3


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["tests/data/startup.log.gz"], 2, "no longer changes"),
        (["--since", "2h"], 2, "starts now"),
        (["--format", "markdown"], 2, "--format json"),
    ],
)
def test_what_cannot_be_looked_on_at(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    assert main(["doctor", "--watch", *arguments]) == code
    assert says in capsys.readouterr().err
