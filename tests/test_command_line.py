"""The commands `monitor` and `kvscope`: what they import, their help, their names, the runbooks they print."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from kvscope.command import main as kvscope
from kvscope.monitor.detectors.registry import CATALOGUE
from kvscope.monitor.detectors.runbook_files import runbook_codes, runbook_text
from kvscope.monitor.terminal import cli

ROOT = Path(__file__).parent.parent


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("real_parts")
def test_the_version_imports_next_to_nothing() -> None:
    code = """
import sys
from kvscope.monitor.terminal.cli import main
try:
    main(["--version"])
finally:
    print(sum(name.partition(".")[0] == "kvscope" for name in sys.modules))
"""
    done = python("-c", code)
    version, ours = done.stdout.splitlines()
    assert version.startswith("kvscope ")
    assert 0 < int(ours) < 40


@pytest.mark.usefixtures("real_parts")
@pytest.mark.parametrize("module", ["kvscope", "kvscope.monitor"])
def test_help_works_in_a_checkout_that_is_not_installed(module: str) -> None:
    """Without site-packages there is no distribution to ask for its version, and no dependency either."""
    for flag, expected in (("--help", "COMMAND"), ("--version", "kvscope not installed")):
        done = python("-S", "-m", module, flag)
        assert (done.returncode, done.stderr) == (0, "")
        assert expected in done.stdout


def lines_of_help(parser: argparse.ArgumentParser) -> dict[str, str | None]:
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {action.dest: action.help for action in commands._choices_actions}


def test_the_help_lists_every_command_with_its_own_line() -> None:
    commands = ROOT / "monitor" / "terminal" / "commands"
    modules = {path.stem for path in commands.glob("*.py")} - {"__init__", "shared_flags"}
    assert {module for module, _ in cli.COMMANDS.values()} == modules
    listed = lines_of_help(cli.parser(only=()))
    assert listed == lines_of_help(cli.parser())
    assert None not in listed.values()


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_command_brings_its_arguments_without_the_others(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: monitor {command}")


def test_kvscope_is_another_name_and_lists_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["doctor", "--help"], ["engine", "serve", "--help"]):
        with pytest.raises(SystemExit) as ended:
            kvscope(arguments)
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert shown.startswith(" ".join(["usage: kvscope", *arguments[:-1]]))
        if arguments == ["--help"]:
            assert "engine " in shown
    assert kvscope(["runbook", "no.such-code"]) == 2
    assert capsys.readouterr().err.startswith("kvscope: ")


def test_a_runbook_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code = "leak.finished-held"
    assert cli.main(["runbook", code]) == 0
    assert capsys.readouterr().out == runbook_text(code)
    assert cli.main(["runbook"]) == 0
    listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert {line[0] for line in listed} >= set(CATALOGUE)
    assert all(len(line) == 2 for line in listed), "each with its title"


def test_an_unknown_code_gets_the_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runbook", "leak.finish-held"]) == 2
    assert "did you mean leak.finished-held" in capsys.readouterr().err
    assert cli.main(["runbook", "../reference"]) == 2
    assert runbook_text("../reference") is None
    assert "leak.finished-held" in runbook_codes()


@pytest.mark.usefixtures("real_parts")
def test_the_probe_loads_beside_files_that_have_our_folders_names(tmp_path: Path) -> None:
    """A module named monitor in the working directory is another program's, and no part of kvscope."""
    for name in ("monitor", "engine", "kernels", "dashboards"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not ours')\n")
    code = """
from importlib.metadata import entry_points
(probe,) = entry_points(group="vllm.general_plugins", name="kvscope")
print(probe.load().__module__)
"""
    done = python("-c", code, cwd=tmp_path)
    assert done.stdout.split() == ["kvscope.monitor.probes.vllm.plugin"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["docter", "x"], "doctor"),
        (["explain", "reqest"], "request"),
        (["doctor", "--fromat", "json", "x"], "--format"),
        (["doctor", "--format", "jsno", "x"], "json"),
        (["serve", "--alert-verdct", "likely"], "--alert-verdict"),
        (["frobnicate"], ""),
    ],
)
def test_a_wrong_word_gets_the_one_that_was_probably_meant(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.partition("Did you mean ")[2].strip() == (f"{meant}?" if meant else "")
