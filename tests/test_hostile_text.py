"""Characters that a terminal obeys, in texts from engines and their clients, reach no terminal and forge no line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvscope.lab.recorded_pages import page as metrics_page
from kvscope.lab.recorded_pages import rows, served
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.description import EngineDescription
from kvscope.monitor.contract.journal import JournalWriter
from kvscope.monitor.contract.wire import NO_REQUEST, Batch, encode
from kvscope.monitor.terminal.cli import main

FORGED = "FORGED critical confirmed"
ORDERS = "\x1b[2J\x1b]0;owned\x07\r\x9b31m\x90q\x9c\u202e\u2066\u2028\u200b\x7f"
HOSTILE = f"req{ORDERS}\n{FORGED}"
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
ENGINE = f"model{ORDERS}\n{FORGED}@host:1/0"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A leak, of which every text is hostile."""
    directory = tmp_path_factory.mktemp("hostile")
    lab = Lab(
        total=101,
        block_size=16,
        connector_share=1.0,
        faults=["leak.finished-held:after=3:limit=4"],
        seed=1,
        engine=ENGINE,
    )
    described = EngineDescription(
        engine=HOSTILE,
        version=HOSTILE,
        model=HOSTILE,
        device=HOSTILE,
        kv_connector=HOSTILE,
        scheduling_policy=HOSTILE,
        num_gpu_blocks=101,
        block_size=16,
        faults=[HOSTILE],
    )
    for n in range(7):
        lab.arrive(60, max_tokens=4, name=f"{HOSTILE}-{n}")
        lab.run_until_idle()
    lab.arrive(60, max_tokens=4000, name=f"{HOSTILE}-running")
    for _ in range(60):
        lab.step(seconds=0.5)
    writer = JournalWriter(directory / "run", lab.packer.epoch)
    for frame in lab.frames:
        if isinstance(frame, Batch) and NO_REQUEST in frame.texts:
            frame = msgspec.structs.replace(frame, texts=frame.texts | {NO_REQUEST: described.to_json()})
        writer.append(encode(frame), frame.sequence)
    writer.close()
    return directory / "run"


def check(output: str, what: str) -> None:
    assert output.strip(), what
    found = OBEYED.search(output)
    assert found is None, f"{what}: {output[max(0, found.start() - 60) : found.end() + 20]!r}"
    lines = output.splitlines()
    assert not any(line.lstrip(" |│─·×‼").startswith(FORGED) for line in lines), what
    if what.endswith(("json", "JSON")):
        json.loads(output)


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    main(arguments)
    out, err = capsys.readouterr()
    if err:
        check(err, f"errors of {arguments}")
    return out


@pytest.mark.parametrize("form", ["table", "short", "markdown", "json"])
def test_doctor(recording: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    arguments = ["doctor", str(recording), "--format", form, "--set", "leak.finished-held.grace_s=1"]
    output = printed(arguments, capsys)
    check(output, f"doctor --format {form}")
    assert "leak.finished-held" in output
    if form == "json":
        assert HOSTILE in json.loads(output)["balances"][0]["configuration"]["model"]
    else:
        assert "\\x1b[2J" in output


@pytest.mark.parametrize("form", ["table", "json"])
def test_explain(recording: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    for thing in (
        ["request", f"{HOSTILE}-3"],
        ["request", f"{HOSTILE}-running"],
        ["block", "40"],
        ["block", "5"],
        ["drop"],
    ):
        output = printed(["explain", *thing, str(recording), "--format", form], capsys)
        check(output, f"explain {thing} {form}")


def test_errors(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(["explain", "request", f"{HOSTILE} nobody", str(recording)], capsys) == ""
    assert printed(["doctor", str(recording / HOSTILE.replace("\x00", ""))], capsys) != ""
    assert printed(["sql", f"SELECT '{HOSTILE}' FROM nothing", str(recording)], capsys) == ""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["table", "json", "csv"])
def test_sql(recording: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    columns = ("engine", "id", f'id AS "{HOSTILE}"', "[id]", "{'a': id}", "'[link=https://evil.example]x[/link]'")
    query = f"SELECT {', '.join(columns)} FROM requests"
    output = printed(["sql", query, str(recording), "--format", form], capsys)
    check(output.replace("\r\n", "\n"), f"sql {query} {form}")


def test_diff_and_bundle(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("table", "json"):
        check(printed(["diff", str(recording), str(recording), "--format", form], capsys), f"diff {form}")
    check(printed(["bundle", str(recording), str(tmp_path / "it.zip"), "--keep-ids"], capsys), "bundle")
    check(printed(["doctor", str(tmp_path / "it.zip")], capsys), "doctor of a bundle")


def test_top_draws_escapes(recording: Path) -> None:
    from kvscope.monitor.questions.pipeline import Pipeline
    from kvscope.monitor.sources.recording import Recording
    from kvscope.monitor.terminal import top_text

    watch = Pipeline()
    watch.feed(list(Recording(recording)))
    views = watch.engines()
    (engine,) = views
    shown = [
        top_text.engines(views, engine.engine).plain,
        top_text.findings(watch.findings("firing"), engine.engine).plain,
        *("\n".join(top_text.row(each)) for each in watch.requests(engine.engine)),
    ]
    for text in shown:
        check(text, "top")


@pytest.mark.parametrize("form", ["table", "short", "json"])
def test_doctor_of_a_hostile_log(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    lines = (
        f"INFO 11-20 12:00:00 [x.py:1] Initializing a V1 LLM engine (v0.32.0) with config: model='{HOSTILE}'",
        f"ERROR 11-20 12:00:01 [core.py:9] ValueError: To serve at least one request {HOSTILE}",
        f"ERROR 11-20 12:00:02 [core.py:9] EngineCore encountered a fatal error. {HOSTILE}",
        f"ERROR 11-20 12:00:03 [core.py:9] torch.OutOfMemoryError: CUDA out of memory. {HOSTILE}",
        f"WARNING 11-20 12:00:04 [nixl.py:9] Releasing expired KV blocks for request {HOSTILE} which were read",
    )
    log = tmp_path / "vllm.log"
    log.write_bytes("\n".join(lines).encode())
    output = printed(["doctor", str(log), "--format", form], capsys)
    check(output, f"doctor of a log, {form}")


def test_doctor_of_a_hostile_metrics_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = metrics_page(rows("never-freed")[0])
    hostile = re.sub(r'model_name="[^"]*"', f'model_name="{ORDERS}"', page)
    assert hostile != page
    with served(hostile) as server:
        output = printed(["doctor", server.url, "--timeout", "3"], capsys)
    if output:
        check(output, "doctor of a metrics page")


def test_the_services_log_has_one_line_for_each_record() -> None:
    code = """
import logging, sys
from kvscope.monitor.service.web_server import log_to_stderr
log_to_stderr()
logger = logging.getLogger("kvscope.monitor.x")
hostile = sys.stdin.buffer.read().decode()
logger.warning("%s cannot be read: %s", hostile, hostile)
try:
    raise ValueError(hostile)
except ValueError:
    logger.exception("a reader failed")
logger.info("not shown")
"""
    done = subprocess.run([sys.executable, "-c", code], input=HOSTILE.encode(), capture_output=True, check=True)
    lines = done.stderr.decode().split("\n")
    assert not any(OBEYED.search(line) for line in lines)
    records = [line for line in lines if line and not line.startswith(" ")]
    assert [record.split()[0] for record in records] == ["WARNING", "ERROR"]
    assert "ValueError: req\\x1b[2J" in done.stderr.decode()


def test_plain_text_is_left_as_it_is() -> None:
    from kvscope.monitor.base.text import escaped, escaped_json, escaped_lines

    plain = "Größe 日本語 × → 🙂 req-1 [bold] \\n"
    assert escaped(plain) == escaped_lines(plain) == escaped_json(plain) == plain
    assert escaped_lines("a\nb\r") == "a\nb\\r"
    assert json.loads(escaped_json(json.dumps({"a": ORDERS}, ensure_ascii=False))) == {"a": ORDERS}
    assert escaped("\ud800") == "\\ud800"


def test_every_console_of_a_command_escapes() -> None:
    monitor = Path(__file__).parents[1] / "monitor"
    made = {
        path.relative_to(monitor).as_posix()
        for path in monitor.rglob("*.py")
        if re.search(r"(?<!terminal_)\bConsole\(", path.read_text(encoding="utf-8"))
    }
    assert made == {"terminal/terminal.py"}
