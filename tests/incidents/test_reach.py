"""The page of reach is that of the tests and runs there are."""

from __future__ import annotations

from tests.incidents.reach import PAGE, reach_page


def test_the_page_of_reach_is_up_to_date() -> None:
    page = reach_page()
    assert PAGE.read_text() == page, "python -m tests.incidents.reach"
    assert "| leak.external-pins | " in page
    marks = {
        line.split(" | ")[0].removeprefix("| "): "lab only" in line
        for line in page.partition("\n## ")[0].splitlines()
        if "|" in line
    }
    assert marks["sizing.overreserved"]
    assert not marks["leak.finished-held"]  # a test leads a vLLM into it
