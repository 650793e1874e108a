"""Engines that number their requests from 0, in the ledger's balance."""

from __future__ import annotations

from tests.detectors.spoken import Spoken


def test_the_request_of_number_0_is_an_owner_like_any_other() -> None:
    """It runs, and shares a block with one that waits."""
    scene = Spoken(total=9)
    scene.arrive(0, [1, 2])
    scene.log.arrived(1, "r-1", 8, 8, 0, 2, 4)
    scene.log.reused(1, [1])
    scene.say()
    parts = scene.ledger.balance()
    assert parts.holds
    assert (parts.running, parts.waiting) == (2, 0)
