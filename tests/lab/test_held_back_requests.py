"""How many requests a head of the queue holds back, as the witnesses of both engines count them."""

from __future__ import annotations

from kvscope.lab.waste_log import held_back


def test_beside_others_only_those_count_that_fit_together() -> None:
    assert held_back([6, 6, 6], 13, 8, others_run=True) == 2
    assert held_back([12, 6, 1], 13, 8, others_run=True) == 2, "one that has no room left does not end the count"
    assert held_back([14, 15], 13, 8, others_run=True) == 0


def test_at_most_as_many_count_as_there_are_places() -> None:
    assert held_back([1] * 5, 13, 3, others_run=True) == 3
    assert held_back([1] * 5, 13, 0, others_run=True) == 0


def test_with_nothing_running_each_could_have_the_room_in_turn() -> None:
    assert held_back([6, 6, 6, 14], 13, 1, others_run=False) == 3
