"""Counts the requests that a head of the waiting queue holds back."""

from __future__ import annotations

from collections.abc import Iterable


def held_back(needs: Iterable[int], free: int, places: int, *, others_run: bool) -> int:
    """Count the requests, by the blocks that each needs, that would run in `free` blocks if it were not for the head.

    Beside others, these are as many as fit together, in at most `places`. With nothing running, each that fits alone
    could have the room in turn.
    """
    if not others_run:
        return sum(needed <= free for needed in needs)
    count = 0
    for needed in needs:
        if count < places and needed <= free:
            count, free = count + 1, free - needed
    return count
