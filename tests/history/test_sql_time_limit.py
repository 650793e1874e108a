"""A query of `monitor sql` ends at its time limit, and one that keeps it has all its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.monitor.cli import main
from kvscope.monitor.history.sql_segments import BadQuery
from kvscope.monitor.history.sql_tables import SqlInput, answer
from tests.lab import Lab
from tests.recordings import recording_of

ENDLESS = "SELECT count(*) FROM range(1000000000) AS a, range(1000000000) AS b WHERE a.range * b.range = 7"


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    lab = Lab(total=60)
    lab.arrive(12, max_tokens=4)
    lab.step(seconds=0.3)
    return recording_of(lab, tmp_path / "recording")


def test_a_query_that_computes_for_ever_is_stopped(recording: Path) -> None:
    with (
        pytest.raises(BadQuery, match=r"stopped after 0\.5 s"),
        answer(ENDLESS, SqlInput(recording), timeout_s=0.5) as found,
    ):
        list(found.rows)


def test_the_command_names_the_limit_and_exits_with_2(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sql", ENDLESS, str(recording), "--timeout", "0.5"]) == 2
    assert "stopped after 0.5 s" in capsys.readouterr().err


def test_a_query_within_its_limit_has_all_its_rows(recording: Path) -> None:
    with answer("SELECT * FROM range(50000)", SqlInput(recording), timeout_s=30.0) as found:
        assert sum(1 for _ in found.rows) == 50_000
