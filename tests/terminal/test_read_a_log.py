"""docs/read-a-log.md shows what doctor prints, at 80 columns."""

from __future__ import annotations

from tests.terminal.read_a_log import PAGE, SHOWN, written


def test_the_page_shows_what_doctor_prints() -> None:
    page = PAGE.read_text()
    assert len(SHOWN.findall(page)) == 3
    assert written(page) == page, "run python -m tests.terminal.read_a_log"
    assert max(len(line) for shown in SHOWN.finditer(page) for line in shown[0].splitlines()) <= 80
