"""`monitor doctor` from the command line to what is printed and returned."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.lab.stepped_recordings import healthy_lab, leaking_lab, recording_of
from kvscope.monitor.detectors.judgement import SEVERITIES
from kvscope.monitor.probes.publisher import Publisher
from kvscope.monitor.terminal import report
from kvscope.monitor.terminal.cli import main

DATA = Path(__file__).parent.parent / "data"
SCHEMA = json.loads((Path(report.__file__).parent / "report.schema.json").read_text())


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recording_of(leaking_lab(), tmp_path_factory.mktemp("leaking"))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recording_of(healthy_lab(), tmp_path_factory.mktemp("healthy"))


def doctor_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--format", "json", *map(str, arguments)])
    printed = json.loads(capsys.readouterr().out)
    jsonschema.validate(printed, SCHEMA)
    return code, printed


def test_the_schema_file_is_what_the_report_is() -> None:
    assert json.loads(msgspec.json.encode(report.schema())) == SCHEMA


def test_the_first_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """The log that started it: a pool at 99.3 % with one request running, and nothing that says why."""
    code, printed = doctor_json(capsys, DATA / "seed-000.log")
    assert code == 1
    (finding,) = [f for f in printed["findings"] if f["severity"] != "info"]
    assert (finding["code"], finding["verdict"]) == ("leak.finished-held", "likely")
    evidence = {item["name"]: item["value"] for item in finding["evidence"]}
    assert evidence["usage_per_1000_prompt_tokens"] == pytest.approx(0.98, abs=0.01)
    assert evidence["r_squared"] == pytest.approx(0.998, abs=0.001)
    assert evidence["correlation_with_running"] == pytest.approx(-0.1, abs=0.05)
    assert evidence["usage_per_running_first"] == pytest.approx(2.3)
    assert evidence["usage_per_running_last"] == pytest.approx(99.3)
    assert "did not fall when Running dropped from 13 to 1" in finding["explanation"]
    assert finding["missing"]


@pytest.mark.parametrize(
    ("log", "codes"),
    [
        ("never-freed", ["leak.finished-held"]),
        ("lockstep-collapse", ["collapse.lockstep"]),
        ("healthy-shared-prefix", []),
        ("kv-events", []),
        ("startup", []),
        ("decode-growth-preempts", []),
    ],
)
def test_the_recorded_logs_of_real_engines(capsys: pytest.CaptureFixture[str], log: str, codes: list[str]) -> None:
    code, printed = doctor_json(capsys, DATA / f"{log}.log.gz")
    grave = [f for f in printed["findings"] if SEVERITIES.index(f["severity"]) >= SEVERITIES.index("warning")]
    assert [f["code"] for f in grave] == codes
    # A log does not show how requests ended.
    assert all(f["verdict"] == ("cannot-tell" if f["code"] == "collapse.lockstep" else "likely") for f in grave)
    # What has no line of figures cannot be called healthy.
    assert code == (1 if codes else 3 if printed["targets"][0]["status"] == "cannot-tell" else 0)


def test_a_recording_with_a_leak_names_its_culprits(capsys: pytest.CaptureFixture[str], leaking: Path) -> None:
    code, printed = doctor_json(capsys, leaking)
    assert code == 1
    (finding,) = [f for f in printed["findings"] if f["severity"] != "info"]
    assert (finding["code"], finding["verdict"]) == ("leak.finished-held", "likely")
    assert finding["culprits"]["requests"] == ["req-3", "req-4", "req-5", "req-6"]
    (balance,) = printed["balances"]
    assert balance["finished"] == len(finding["culprits"]["blocks"]) > 0
    parts = ("free", "cached_idle", "running", "waiting", "finished", "reserved", "unaccounted")
    assert sum(balance[part] for part in parts) == balance["total"] == 101
    for key in ("since", "position", "evidence", "explanation", "do_now", "change", "wont_help", "runbook"):
        assert finding[key]
    assert balance["faults"]  # the fault is said; whether it led the judgement is what tests/detectors asks


def test_exit_codes(capsys: pytest.CaptureFixture[str], leaking: Path, healthy: Path, tmp_path: Path) -> None:
    silent = f"ipc://{tmp_path}/nobody"
    assert doctor_json(capsys, healthy)[0] == 0
    assert doctor_json(capsys, leaking)[0] == 1
    assert doctor_json(capsys, leaking, "--fail-on", "error")[0] == 1
    assert doctor_json(capsys, leaking, "--fail-on", "never")[0] == 0
    assert doctor_json(capsys, DATA / "lockstep-collapse.log.gz", "--fail-on", "error")[0] == 0
    assert doctor_json(capsys, tmp_path / "missing")[0] == 2
    assert doctor_json(capsys, silent, "--timeout", "0.2")[0] == 3
    assert doctor_json(capsys, healthy, silent, "--timeout", "0.2")[0] == 3
    assert doctor_json(capsys, leaking, silent, "--timeout", "0.2")[0] == 1
    assert doctor_json(capsys, leaking, silent, tmp_path / "missing", "--timeout", "0.2")[0] == 2
    assert main(["doctor", str(healthy), "--set", "leak.finished-held.grace=3"]) == 2
    assert "leak.finished-held.grace_s" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--no-such-flag"])
    capsys.readouterr()


def test_what_cannot_be_told_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "other.log").write_text("INFO nothing of interest\n")
    (tmp_path / "empty.log").write_text("")
    (tmp_path / "noise.bin").write_bytes(os.urandom(5000))
    (tmp_path / "cut.log.gz").write_bytes(gzip.compress(b"INFO one\n" * 5000)[:40])
    (tmp_path / "folder").mkdir()
    for target, expected, says in (
        ("other.log", "cannot-tell", "Running: "),
        ("empty.log", "cannot-tell", "Running: "),
        ("noise.bin", "cannot-tell", "Running: "),
        ("cut.log.gz", "cannot-tell", "Running: "),
        ("folder", "bad-target", "EPOCH-SEQUENCE"),
        ("missing", "bad-target", "no such file"),
    ):
        _, printed = doctor_json(capsys, tmp_path / target)
        (reported,) = printed["targets"]
        assert reported["status"] == expected, target
        assert says in reported["error"]
        assert printed["findings"] == printed["balances"] == []


def test_a_live_stream(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lab = Lab(total=50, clock=time, pack=False)
    publisher = Publisher(
        lab.log,
        "lab@127.0.0.1:0/0",
        lab.vitals,
        events=f"ipc://{tmp_path}/e",
        replay=f"ipc://{tmp_path}/e-replay",
        heartbeat_s=0.1,
    )
    publisher.start()
    try:
        lab.arrive(30, name="alive")
        lab.step()
        code, printed = doctor_json(capsys, publisher.events_endpoint, "--for", "0.5")
        assert code == 0
        (balance,) = printed["balances"]
        assert (balance["signal"], balance["running_requests"]) == ("stream", 1)
        assert balance["running"] == len(lab.blocks_of(1))
        assert main(["explain", "request", "alive", publisher.events_endpoint, "--for", "0.2"]) == 0
        assert "RUNNING" in capsys.readouterr().out
    finally:
        publisher.close()


def in_a_terminal(arguments: list[str], columns: int = 80) -> str:
    """What `monitor` prints into a terminal that wide, escape sequences and all."""
    primary, secondary = pty.openpty()
    termios.tcsetwinsize(secondary, (40, columns))
    with subprocess.Popen(
        [sys.executable, "-m", "kvscope.monitor", *arguments],
        stdout=secondary,
        stdin=secondary,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"},
    ):
        os.close(secondary)
        chunks = []
        while True:
            try:
                chunk = os.read(primary, 65536)
            except OSError:  # the other side has closed
                break
            if not chunk:
                break
            chunks.append(chunk)
    os.close(primary)
    return b"".join(chunks).decode()


@pytest.mark.parametrize("target", ["leaking", "seed"])
def test_the_table_fits_a_terminal_of_80_columns(target: str, leaking: Path) -> None:
    path = leaking if target == "leaking" else DATA / "seed-000.log"
    # The process has the shipped default, by which a first transfer is information for a minute.
    printed = in_a_terminal(["doctor", str(path), "--set", "leak.finished-held.unseen_times=0"])
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip() for line in printed.splitlines()]
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    words = ("FINDINGS", "error  leak.finished-held", "Do now", "Change", "Won't help", "ENGINE")
    order = [text.index(word) for word in words]
    assert order == sorted(order)


def test_black_and_white_when_it_is_no_terminal(leaking: Path) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "kvscope.monitor", "doctor", str(leaking)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "\x1b" not in printed.stdout
    assert max(map(len, printed.stdout.splitlines())) <= 80
    assert "finished, held" in printed.stdout
    assert printed.stderr == ""


def test_short_and_markdown(capsys: pytest.CaptureFixture[str], leaking: Path) -> None:
    assert main(["doctor", str(leaking), "--format", "short"]) == 1
    note, line = [line for line in capsys.readouterr().out.splitlines() if "leak." in line]
    assert note.startswith("note lab@127.0.0.1:0/0: Faults were switched on by hand")
    assert line.startswith("error likely leak.finished-held lab@127.0.0.1:0/0 ")
    assert "req-3" in line
    assert main(["doctor", str(leaking), "--format", "markdown"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("# kvscope doctor\n")
    assert "| finished, held | " in text
    assert "switched on by hand" in text


def test_explain(capsys: pytest.CaptureFixture[str], leaking: Path) -> None:
    assert main(["explain", "request", "req-3", str(leaking)]) == 0
    text = capsys.readouterr().out
    assert "FINISHED_LENGTH_CAPPED" in text
    assert [line.split()[0] for line in text.splitlines() if line[:1].isalpha()] == [
        "REQUEST",
        "WAITS",
        "PHASES",
        "CONDITIONS",
        "HISTORY",
    ]
    assert max(map(len, text.splitlines())) <= 80
    lab = leaking_lab()
    block = next(b for n in lab.manager.tables for b in lab.blocks_of(n) if lab.scheduler.requests[n].id == "req-3")
    assert main(["explain", "block", str(block), str(leaking)]) == 0
    text = capsys.readouterr().out
    assert "req-3" in text
    assert "connector" in text.lower()
    assert main(["explain", "request", "nobody", str(leaking)]) == 3
    assert "nobody" in capsys.readouterr().err
    assert main(["explain", "block", "100000", str(leaking)]) == 3
    assert main(["explain", "block", "x", str(leaking)]) == 2
    capsys.readouterr()
