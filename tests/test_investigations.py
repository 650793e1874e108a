"""The pages of docs/investigations: each command runs, and prints what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

import pytest

from kvscope.monitor.terminal.cli import main

ROOT: Final = Path(__file__).parent.parent
FOLDER: Final = ROOT / "docs" / "investigations"
LEFT_OUT: Final = "…"
"""A line that stands for lines of the output that the page leaves out."""
MAX_RECORDING_BYTES: Final = 150_000


def shown_commands(page: str) -> list[tuple[str, str]]:
    """Return each command of a page and the output below it, empty for a command that stands alone."""
    found: list[tuple[str, str]] = []
    for block in re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command.partition(" #")[0].strip(), output))
    return found


def missing_parts(shown: str, printed: str) -> list[str]:
    """Return the parts of `shown`, between the lines that stand for what is left out, that `printed` lacks in order."""
    missing, at = [], 0
    for part in re.split(rf"^{LEFT_OUT}\n", shown, flags=re.MULTILINE):
        text = part.strip("\n")
        found = printed.find(text, at)
        if found < 0:
            missing.append(text)
        else:
            at = found + len(text)
    return missing


def test_six_incidents_have_a_page_with_commands() -> None:
    pages = [page.read_text() for page in FOLDER.glob("*.md")]
    assert len(pages) == 7
    assert all(shown_commands(page) for page in pages)


def test_a_part_that_was_not_printed_is_noticed() -> None:
    assert missing_parts("…\nb\nc\n…\ne\n", "a\nb\nc\nd\ne\n") == []
    assert missing_parts("e\n…\nb\n", "a\nb\nc\nd\ne\n") == ["b"]
    assert missing_parts("b\nd\n", "a\nb\nc\nd\ne\n") == ["b\nd"]


@pytest.mark.slow
@pytest.mark.usefixtures("real_parts")
def test_the_commands_print_what_their_pages_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    failed = []
    for page in sorted(FOLDER.glob("*.md")):
        for command, shown in shown_commands(page.read_text()):
            program, *arguments = shlex.split(command)
            assert program == "monitor"
            if arguments[0] == "replay":
                arguments[arguments.index("--speed") + 1] = "100000"
                arguments += ["--events", f"ipc://{tmp_path}/events"]
            if arguments[0] == "export":
                arguments[-1] = str(tmp_path / arguments[-1])
            code = main(arguments)
            missing = missing_parts(shown, capsys.readouterr().out)
            if code not in (0, 1, 3) or missing:
                failed.append((page.name, command, code, missing))
    assert failed == []


def test_the_recordings_are_small_and_each_is_opened_by_a_page() -> None:
    recordings = {path.name: path.stat().st_size for path in FOLDER.glob("*.zip")}
    assert max(recordings.values()) < MAX_RECORDING_BYTES
    text = "".join(page.read_text() for page in FOLDER.glob("*.md"))
    assert [name for name in recordings if f"docs/investigations/{name}" not in text] == []
