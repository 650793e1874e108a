"""What a person is told of six incidents is what was read and found good. test_traced.py traces its numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.terminal import golden
from tests.terminal.golden import GOLDEN, TOLD

ANEW = "read what has changed, then: python -m tests.terminal.golden"


@pytest.fixture(scope="module", params=TOLD)
def code(request: pytest.FixtureRequest) -> Iterator[str]:
    """One of the incidents, recorded in what is now the current directory."""
    with golden.recorded(request.param):
        yield request.param


@pytest.mark.slow
def test_what_is_printed(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for path, text in golden.outputs(code).items():
        assert text == path.read_text(), f"{path.name}: {ANEW}"
        assert max(map(len, text.splitlines()[1:])) <= 80


def test_no_file_is_left_over() -> None:
    wanted = {f"{code}.{name}.txt" for code, reported in TOLD.items() for name in (*reported.commands, "top")}
    assert {path.name for path in GOLDEN.iterdir()} == wanted
