"""A renamed attribute of a judgement is a type error where a tie reads it, and where a detector returns it."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvscope.monitor.detectors.registry import EFFECTS

DETECTORS = Path(__file__).parent.parent.parent / "monitor" / "detectors"

SNIPPET = """
from kvscope.monitor.detectors.detector import Causes
from kvscope.monitor.detectors.judgement import HoldsBlocks, Judgement, ShortOfBlocks
from kvscope.monitor.detectors.leak.finished_held import FinishedHeld
from kvscope.monitor.detectors.stuck.head_of_line import HeadOfLine
from kvscope.monitor.detectors.stuck.remote_load import RemoteLoad
from kvscope.monitor.detectors.judgement import holds_much, holds_what_it_needs

FITS = Causes[HoldsBlocks]().of(HeadOfLine, holds_what_it_needs)


def reads_another_name(cause: Judgement, effect: ShortOfBlocks) -> bool:
    return bool(effect.blocks_wanted)  # error: attr-defined


NO_SUCH_EFFECT = Causes[Judgement]().of(RemoteLoad, holds_what_it_needs)  # error: arg-type
NO_SUCH_CAUSE = Causes[Judgement]().of(HeadOfLine, holds_much)  # error: arg-type
WITHOUT = ShortOfBlocks(code="", engine="", verdict="likely", explanation="", blocks_needed=1)  # error: call-arg
RENAMED = HoldsBlocks(code="", engine="", verdict="likely", explanation="", share=0.5)  # error: call-arg


class Detects(FinishedHeld):
    causes = Causes[Judgement]()  # error: assignment
"""


@pytest.mark.slow
def test_each_renamed_key_is_an_error_and_the_sound_line_is_none(tmp_path: Path) -> None:
    snippet = tmp_path / "renamed.py"
    snippet.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(tmp_path / "cache")]
    checked = subprocess.run([*command, str(snippet)], capture_output=True, text=True, cwd=DETECTORS.parent.parent)
    found = {
        (int(line), kind) for line, kind in re.findall(r"renamed\.py:(\d+): error: .*\[([\w-]+)\]", checked.stdout)
    }
    lines = enumerate(SNIPPET.splitlines(), 1)
    expected = {(number, line.partition("# error: ")[2]) for number, line in lines if "# error: " in line}
    assert found == expected, checked.stdout


def test_no_tie_reads_evidence() -> None:
    ties = [tie for effects in EFFECTS.values() for tie in effects.values()]
    assert len(ties) > 20
    for tie in ties:
        assert "evidence" not in inspect.getsource(tie)
