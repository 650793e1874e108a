"""Every command in the docs: each is run, here or by the test that EXCEPTIONS names, and each has flags that exist."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kvscope.lab.stepped_recordings import healthy_lab, leaking_lab, recording_of
from kvscope.monitor.terminal.cli import main, parser

ROOT: Final = Path(__file__).parent.parent
DATA: Final = ROOT / "tests" / "data"
FOLLOWED: Final = {
    "docs/start/demo.md": "tests/test_tutorials.py",
    "docs/start/vllm.md": "tests/test_tutorials.py",
    "docs/investigations/": "tests/test_investigations.py",
    "docs/read-a-log.md": "tests/terminal/test_read_a_log.py",
    "docs/python-api.md": "tests/test_python_api.py",
}
"""Pages, or folders of them, whose commands another test runs one after the other."""
EXCEPTIONS: Final = {
    r"kubectl |helm ": "needs Kubernetes: tests/deploy renders the chart with Helm",
    r"docker ": "needs Docker: tests/deploy reads docker-compose.yml",
    r"make (demo|check|test|lint|slow|docs|site|bench|prove|fleet)\b": "a test below looks for the target",
    r"git |\.venv/bin/python -m (hatchling|scripts\.(advisories|sbom))": "of a release: tests/test_supply_chain.py",
    r"python3\.11 -m venv|(\S+/|\S+ )?pip install": "changes the environment: tests/test_install.py installs the wheel",
    r"(KVSCOPE_EVENTS=\S+ )?vllm serve MODEL": "needs a model: tests/test_tutorials.py starts vLLM with the probe",
    r"monitor probe check": "needs vLLM: tests/test_tutorials.py",
    r"export \w+=": "sets variables for the commands below it",
    r"echo \$\?": "prints the exit code of the command above it",
    r"curl -H .* https://hub\.example/": "a hub: tests/fleet asks one",
    r"curl -s http://127\.0\.0\.1:8765/healthz": "tests/test_api.py asks a running service",
    r"python -m kvscope\.lab\b": "takes minutes to hours: tests/lab, and `make slow` runs a part",
    r"kvscope engine serve": "two engines: tests/engine hands KV from one to the other",
    r"kvscope engine bench": "tests/engine/test_bench.py",
    r"monitor (serve|agent|hub)\b": "runs until it is stopped: tests/test_service.py, tests/fleet, tests/outputs",
    r"monitor bus (setup|status)": "needs NATS with TLS: tests/fleet starts one",
    r"monitor sql .*s3://": "needs S3: tests/history reads an archive from moto's server",
    r"monitor sql": "tests/history/test_sql.py runs the queries of docs/history.md",
    r"monitor alerts test": "needs receivers: tests/outputs",
    r"monitor top": "needs a terminal: tests/terminal/test_top.py",
    r"monitor replay": "publishes until its end: tests/history/test_replay.py",
    r"\S*monitor .*(tcp|http|prometheus\+http)://|\S*monitor doctor .*--(watch|prometheus)": (
        "a live target: tests/terminal/test_every_source.py reads one of each kind"
    ),
    r"monitor doctor -$": "standard input: tests/terminal/test_doctor.py",
    r"gzip ": "packs a log",
}
"""Commands that this test does not run, by how they begin, each with the reason or with the test that does."""


OUTSIDE_QUOTES: Final = r"""(?=(?:[^"]*"[^"]*")*[^"]*$)"""


class ShownCommand(NamedTuple):
    """A command of a page, as one line without its comment."""

    page: str
    text: str


def commands_of(path: Path) -> list[ShownCommand]:
    """Return the commands of a page: what stands after `$ `, with the lines that continue it; a pipe has several."""
    found: list[ShownCommand] = []
    page = path.relative_to(ROOT).as_posix()
    for block in re.findall(r"^ *```console\n(.*?)^ *```", path.read_text(), re.MULTILINE | re.DOTALL):
        lines = block.splitlines()
        for number, line in enumerate(lines):
            if not line.lstrip().startswith("$ "):
                continue
            text, rest = without_comment(line.lstrip().removeprefix("$ ")), lines[number + 1 :]
            while rest and (text.endswith("\\") or text.count('"') % 2):
                text = f"{text.removesuffix(chr(92))} {rest.pop(0).strip()}"
            parts = re.split(rf" [|&] {OUTSIDE_QUOTES}|; (?=monitor )| &$", text)
            found.extend(ShownCommand(page, part.strip()) for part in parts if part.strip())
    return found


def without_comment(text: str) -> str:
    return re.split(rf"\s+#\s{OUTSIDE_QUOTES}", text)[0].strip()


@cache
def shown_commands() -> tuple[ShownCommand, ...]:
    """All commands of the docs, in the order of the pages."""
    pages = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    return tuple(command for path in pages for command in commands_of(path))


def reason_not_to_run(command: ShownCommand) -> str:
    """Return why this test does not run it; empty if it does."""
    for start, test in FOLLOWED.items():
        if command.page.startswith(start):
            return test
    return next((why for begins, why in EXCEPTIONS.items() if re.match(begins, command.text)), "")


@cache
def run_commands() -> tuple[ShownCommand, ...]:
    """Those that this test runs, each once."""
    return tuple(sorted({each.text: each for each in shown_commands() if not reason_not_to_run(each)}.values()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the commands of the docs name."""
    path = tmp_path_factory.mktemp("reader")
    leaking = recording_of(leaking_lab(), path / "run")
    for name in ("run1", "recording", "monday"):
        shutil.copytree(leaking, path / name)
    recording_of(healthy_lab(), path / "friday")
    log = gzip.decompress((DATA / "never-freed.log.gz").read_bytes())
    for name in ("server.log", "engine.log"):
        (path / name).write_bytes(log)
    (path / "server.log.gz").write_bytes(gzip.compress(log))
    shutil.copy(DATA / "seed-001.txt", path / "report.txt")
    with zipfile.ZipFile(path / "collected.zip", "w") as packed:
        packed.writestr("server.log", log)
    model = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    (path / "Llama-3.1-8B").mkdir()
    (path / "Llama-3.1-8B" / "config.json").write_text(
        json.dumps({**model, "head_dim": 128, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"})
    )
    index = {"metadata": {"total_size": 16_060_522_496}, "weight_map": {}}
    (path / "Llama-3.1-8B" / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "agent.toml").write_text('events = ["tcp://127.0.0.1:5757"]\n')
    (path / "tests").symlink_to(ROOT / "tests")
    (path / "docs").symlink_to(ROOT / "docs")
    return path


def test_the_commands_are_found_and_each_exception_is_one_of_some_command() -> None:
    assert len(shown_commands()) > 120
    assert len(run_commands()) > 15
    unused = [begins for begins in EXCEPTIONS if not any(re.match(begins, each.text) for each in shown_commands())]
    assert unused == [], "no page has such a command: remove the exception"
    assert [each for each in run_commands() if "monitor" not in each.text] == []


def test_the_commands_of_the_docs_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    failed = []
    for command in run_commands():
        for made in (*folder.glob("*.pftrace"), *folder.glob("bundle.zip")):
            made.unlink()
        code = exit_code(main, shlex.split(command.text)[1:])
        printed = capsys.readouterr()
        if code not in (0, 1, 3) or not (printed.out or printed.err):
            failed.append((command, code, printed.err))
    assert failed == []


def test_the_flags_of_the_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Of those that are not run here, too: their tests may give other flags than the docs."""
    parse, failed, parsed = parser().parse_args, [], 0
    for command in sorted(set(shown_commands())):
        words = shlex.split(command.text.replace("…", ""))
        if words and re.fullmatch(r"(\.venv(-vllm)?/bin/)?monitor", words[0]):
            parsed += 1
            code = exit_code(lambda arguments: parse(arguments) and 0, words[1:])
            message = capsys.readouterr().err
            if code:
                failed.append((command, message))
    assert parsed > 80
    assert failed == []


def exit_code(run: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Return the exit code of a command, also of --help, --version and a wrong flag, which end the process."""
    try:
        return run(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {each.text.split()[1] for each in shown_commands() if each.text.startswith("make ")}
    assert named <= targets
