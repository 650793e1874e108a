"""The counts of prose agree with earlier counts of two projects' docs, and a count that does not agree is named."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from scripts.prose_calibration import ANCHORS, UNREPRODUCED, Anchor, Comparison, compared, counted
from scripts.prose_check import Measured

CLONES = os.environ.get("KVSCOPE_TEST_ANCHORS", "")


def test_a_measure_agrees_within_a_fifth_however_rare_it_is() -> None:
    assert Comparison("a", "passives", 25, 29.9).agrees
    assert not Comparison("a", "passives", 25, 31).agrees
    assert not Comparison("a", "you", 34, 26).agrees
    assert Comparison("a", "openings", 0.8, 0.7).agrees
    assert not Comparison("a", "openings", 0.8, 0.4).agrees


def test_only_the_one_known_difference_is_excused() -> None:
    assert Comparison("datasette", "openings", 0.8, 0.3).verdict == "  not reproduced"
    assert Comparison("datasette", "semicolons", 0.7, 1.0).verdict == "  does not agree"
    assert Comparison("structlog", "openings", 1.2, 0.3).verdict == "  does not agree"


def test_the_docs_are_counted_as_they_are_at_the_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        made = subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, check=True)
        return made.stdout.decode().strip()

    git("init", "--quiet")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("You set the variable. The value is stored.\n")
    (tmp_path / "docs" / "changes.md").write_text("What changed; what did not.\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "docs")
    anchor = Anchor("project", git("rev-parse", "HEAD"), ("changes.md",), Measured(0, 50, 0, 0, 125))
    (tmp_path / "docs" / "page.md").write_text("Later.\n")
    now = counted(anchor, tmp_path)
    assert now == Measured(openings=0, passives=50, semicolons=0, odd_words=0, you=125)
    assert all(row.agrees for row in compared(anchor, now))
    with pytest.raises(subprocess.CalledProcessError):
        counted(anchor._replace(commit="0" * 40), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not CLONES, reason="git clone datasette and structlog, name the folder in KVSCOPE_TEST_ANCHORS")
@pytest.mark.parametrize("anchor", ANCHORS, ids=lambda anchor: anchor.name)
def test_counts_agree_with_the_earlier_ones(anchor: Anchor) -> None:
    now = counted(anchor, Path(CLONES) / anchor.name)
    unlike = {(row.anchor, row.measure) for row in compared(anchor, now) if not row.agrees}
    assert unlike == {each for each in UNREPRODUCED if each[0] == anchor.name}
