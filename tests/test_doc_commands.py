"""Every command in the docs: each is run, here or by the test that EXCEPTIONS names, and each has flags that exist."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
import zipfile
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kvscope.monitor.cli import main, parser
from tests.recordings import healthy_lab, leaking_lab, recording_of

ROOT: Final = Path(__file__).parent.parent
DATA: Final = ROOT / "tests" / "data"
PAGES: Final = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLLOWED: Final = {
    "docs/start/demo.md": "tests/test_tutorials.py",
    "docs/start/vllm.md": "tests/test_tutorials.py",
    "docs/investigations/": "tests/test_investigations.py",
    "docs/read-a-log.md": "tests/doctor/test_read_a_log.py",
    "docs/python-api.md": "tests/test_python_api.py",
}
"""Pages, or folders of them, whose commands another test runs one after the other."""
EXCEPTIONS: Final = {
    r"kubectl |helm ": "needs Kubernetes: tests/deploy renders the chart with Helm",
    r"docker ": "needs Docker: tests/deploy reads docker-compose.yml",
    r"make (demo|test|lint|slow|docs|site|bench|prove|fleet)\b": "a test below looks for the target",
    r"git |\.venv/bin/python -m (hatchling|scripts\.advisories)": "a step of a release: tests/test_supply_chain.py",
    r"(\S+ )?pip install": "changes the environment: tests/test_install.py installs the wheel",
    r"(KVSCOPE_EVENTS=\S+ )?vllm serve MODEL": "needs a model: tests/test_tutorials.py starts vLLM with the probe",
    r"monitor probe check": "needs vLLM: tests/test_tutorials.py",
    r"export \w+=": "sets variables for the commands below it",
    r"echo \$\?": "prints the exit code of the command above it",
    r"curl -s http://127\.0\.0\.1:8765/healthz": "tests/test_api.py asks a running service",
    r"python -m tests\.chaos\.": "takes hours: `make slow` runs a part",
    r"kvscope engine serve": "two engines: tests/engine hands KV from one to the other",
    r"kvscope engine bench": "tests/engine/test_bench.py",
    r"monitor incidents": "takes minutes to hours: tests/incidents",
    r"monitor (serve|agent|hub)\b": "runs until it is stopped: tests/test_service.py, tests/hub, tests/exporters",
    r"monitor bus (setup|status)": "needs NATS with TLS: tests/bus starts one",
    r"monitor sql .*s3://": "needs S3: tests/history reads an archive from moto's server",
    r"monitor sql": "tests/history/test_sql.py runs the queries of docs/history.md",
    r"monitor alerts test": "needs receivers: tests/alerting",
    r"monitor top": "needs a terminal: tests/doctor/test_top.py",
    r"monitor replay": "publishes until its end: tests/history/test_replay.py",
    r"\S*monitor .*(tcp|http|prometheus\+http)://|\S*monitor doctor .*--(watch|prometheus)": (
        "a live target: tests/doctor/test_every_source.py reads one of each kind"
    ),
    r"monitor doctor -$": "standard input: tests/doctor/test_doctor.py",
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


COMMANDS: Final = [command for path in PAGES for command in commands_of(path)]


def reason_not_to_run(command: ShownCommand) -> str:
    """Return why this test does not run it; empty if it does."""
    for start, test in FOLLOWED.items():
        if command.page.startswith(start):
            return test
    return next((why for begins, why in EXCEPTIONS.items() if re.match(begins, command.text)), "")


RUN: Final = sorted({each.text: each for each in COMMANDS if not reason_not_to_run(each)}.values())


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
    assert len(COMMANDS) > 120
    assert len(RUN) > 15
    unused = [begins for begins in EXCEPTIONS if not any(re.match(begins, each.text) for each in COMMANDS)]
    assert unused == [], "no page has such a command: remove the exception"
    assert all("monitor" in each.text for each in RUN), [each for each in RUN if "monitor" not in each.text]


@pytest.mark.parametrize("command", RUN, ids=lambda command: command.text)
def test_a_command_of_the_docs_runs(
    command: ShownCommand, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    for made in (*folder.glob("*.pftrace"), *folder.glob("bundle.zip")):
        made.unlink()
    _, *arguments = shlex.split(command.text)
    try:
        code = main(arguments)
    except SystemExit as ended:  # --help and --version
        code = int(ended.code or 0)
    printed = capsys.readouterr()
    assert code in (0, 1, 3), printed.err
    assert printed.out or printed.err


@pytest.mark.parametrize("command", sorted(set(COMMANDS)), ids=lambda command: command.text[:60])
def test_the_flags_of_a_command_exist(command: ShownCommand, capsys: pytest.CaptureFixture[str]) -> None:
    """Of those that are not run here, too: their tests may give other flags than the docs."""
    words = shlex.split(command.text.replace("…", ""))
    if not words or not re.fullmatch(r"(\.venv(-vllm)?/bin/)?monitor", words[0]):
        return
    code: object = 0
    try:
        parser().parse_args(words[1:])
    except SystemExit as ended:  # --help, --version, or a wrong flag
        code = ended.code
    assert not code, capsys.readouterr().err


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {each.text.split()[1] for each in COMMANDS if each.text.startswith("make ")}
    assert named <= targets
