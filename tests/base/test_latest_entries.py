"""A dictionary of the latest entries keeps those that were set, or moved to its end, last."""

from __future__ import annotations

from kvscope.monitor.base.latest_entries import LatestEntries


def test_the_oldest_entry_goes_and_one_that_is_set_again_is_the_latest() -> None:
    entries: LatestEntries[str, int] = LatestEntries(2)
    entries["a"], entries["b"], entries["a"] = 1, 2, 3
    entries["c"] = 4
    assert list(entries.items()) == [("a", 3), ("c", 4)]
    entries.move_to_end("a")
    assert entries.setdefault("d", 5) == 5
    assert list(entries) == ["a", "d"]
