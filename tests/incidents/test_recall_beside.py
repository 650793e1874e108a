"""The comparison with an earlier commit's detectors, here with this checkout as the earlier one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.incidents.recall_beside import Pair, compare_run, main, tables

CHECKOUT = Path(__file__).parents[2]
LEASE_BURST = 45
"""A quick run of seed 20261216 whose finding is right."""


@pytest.mark.slow
def test_the_same_detectors_find_the_same_and_others_are_told_apart() -> None:
    now, same = compare_run(LEASE_BURST, 20261216, "own", CHECKOUT)
    assert not now.error
    assert now.results == same.results
    row = "| leak.lease-burst | 1 | 1 | {} |"
    assert row.format("1 | 0 | 0") in list(tables([Pair(now, same)]))
    blind = msgspec.convert(msgspec.to_builtins(same), type(same))
    blind.results["stream"].claims = []
    assert row.format("0 | 1 | 0") in list(tables([Pair(now, blind)]))


def test_a_directory_that_is_no_checkout_is_not_replaced_by_the_installed_detectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--checkout", str(tmp_path), "--seed", "1", "--fault", "stuck.grammar", "--resume", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["recall_beside", *asked])
    with pytest.raises(SystemExit):
        main()
    assert "is no checkout of kvscope" in capsys.readouterr().err
