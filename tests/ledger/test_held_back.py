"""Time that the head of the queue cost the requests behind it."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.description import EngineDescription, KVGroup
from kvscope.monitor.contract.kinds import Cause, Status
from kvscope.monitor.ledger.engine_state import EngineState
from kvscope.monitor.ledger.queue_state import (
    LONGEST_PASS_NS,
    MOST_ASKED_BEHIND,
    HeldBackQueue,
    HeldBackTime,
    blocks_to_run,
    fitting_together,
    is_short_of_blocks,
    requests_behind,
    sort_living,
    was_left_out,
)
from kvscope.monitor.ledger.records import RequestState

S = 1_000_000_000
FULL = EngineDescription(max_num_seqs=8)


def state(used: int = 60, total: int = 101) -> EngineState:
    """One block of 4 tokens is reserved; by default 40 of 100 are free."""
    found = EngineState()
    found.total, found.reserved, found.used, found.block_size = total, 1, used, 4
    return found


def waiting(name: str, blocks: int = 2, **fields: int) -> RequestState:
    return RequestState(len(name), name, Status.WAITING, prompt_tokens=4 * blocks, **fields)


def head(needed: int = 50, free: int = 40, cause: Cause = Cause.KV_BLOCKS, name: str = "head") -> RequestState:
    return waiting(name, needed, cause=cause, blocks_needed=needed, blocks_free_then=free)


def noted(times_s: list[float], first: RequestState | None, *behind: RequestState) -> HeldBackQueue:
    queue = HeldBackQueue()
    living = sort_living([one for one in (first, *behind) if one is not None])
    for at_s in times_s:
        queue.note(round(at_s * S), state(), FULL, living, first)
    return queue


def over(queue: HeldBackQueue, window_s: float = 60.0, longest_pass_s: float = 0.0) -> HeldBackTime:
    found = queue.over(window_s, longest_pass_s)
    assert found is not None
    return found


# -------------------------------------------------------------------- what a window cost


def test_time_counts_for_each_request_that_would_have_fitted() -> None:
    found = over(noted([0, 1, 2, 3], head(), waiting("a"), waiting("b"), waiting("too large", 41)))
    assert (found.seconds, found.lost_s, found.present_s, found.span_s) == (3, 3 * 2, 3 * 4, 3)
    assert (found.heads, found.since.at_ns, found.worst.at_ns) == (("head",), 0, 2 * S)
    assert (found.worst.needed, found.worst.free) == (50, 40)


def test_nothing_is_lost_without_a_request_that_fits_or_a_head_that_is_refused() -> None:
    assert noted([0, 1, 2], head(), waiting("too large", 41)).over(60, 0) is None
    assert noted([0, 1, 2], head(needed=40, free=40), waiting("a")).over(60, 0) is None
    assert noted([0, 1, 2], None, waiting("a")).over(60, 0) is None
    assert HeldBackQueue().over(60, 0) is None


def test_a_queue_is_noted_at_most_twice_a_second() -> None:
    found = over(noted([0, 0.49, 0.5, 0.9, 1.0], head(), waiting("a")))
    assert (found.since.at_ns, found.worst.at_ns, found.seconds) == (0, S // 2, 1)


@pytest.mark.parametrize(("longest_pass_s", "counted_s"), [(0, 2), (5, 5), (90, 30)])
def test_a_gap_between_passes_counts_as_long_as_a_pass_can_last(longest_pass_s: float, counted_s: float) -> None:
    assert LONGEST_PASS_NS == 2 * S
    found = over(noted([0, 30], head(), waiting("a")), longest_pass_s=longest_pass_s)
    assert (found.seconds, found.span_s) == (counted_s, 30)


def test_a_window_has_only_its_own_time() -> None:
    queue = noted([0, 1, 2, 3, 4], head(), waiting("a"))
    found = over(queue, window_s=2)
    assert (found.since.at_ns, found.seconds, found.span_s) == (2 * S, 2, 2)


@pytest.mark.parametrize(("window_s", "known"), [(6, True), (5.5, False)])
def test_a_head_that_held_others_back_before_the_window_cost_nothing_in_it(window_s: float, known: bool) -> None:
    queue = noted([0, 1], head(), waiting("a"))
    living = sort_living([waiting("a")])
    for at_s in range(2, 8):
        queue.note(at_s * S, state(), FULL, living, None)
    assert (queue.over(window_s, 0) is not None) is known


def test_the_worst_moment_has_the_most_requests_and_heads_are_named_once() -> None:
    queue = HeldBackQueue()
    a, b = waiting("a"), waiting("b")
    for at_s, first, behind in [(0, head(), [a]), (1, head(name="next"), [a, b]), (2, head(), [a]), (3, head(), [a])]:
        queue.note(at_s * S, state(), FULL, sort_living([first, *behind]), first)
    found = over(queue)
    assert (found.worst.at_ns, found.worst.held_back, found.heads) == (1 * S, 2, ("head", "next"))
    assert (found.lost_s, found.present_s) == (1 + 2 + 1, 2 + 3 + 2)


def test_a_loss_ends_the_window() -> None:
    queue = noted([0, 1, 2], head(), waiting("a"))
    damaged = state()
    damaged.damaged = True
    queue.note(3 * S, damaged, FULL, sort_living([]), None)
    assert queue.over(60, 0) is None


# -------------------------------------------------------------------- which requests fit


def test_requests_fit_together_into_the_free_blocks_and_the_places_of_a_step() -> None:
    three = [waiting("a", 20), waiting("b", 20), waiting("c", 1)]
    assert [one.id for one in fitting_together(state(), FULL, three, 0)] == ["a", "b"]
    assert [one.id for one in fitting_together(state(), FULL, three, 7)] == ["a"]
    assert not fitting_together(state(), FULL, three, 8)


def test_a_request_that_holds_all_its_blocks_is_held_back_by_no_lack_of_them() -> None:
    assert not fitting_together(state(), FULL, [waiting("none", 0)], 0)
    holder = waiting("a", 5)
    holder.blocks = [1, 2, 3]
    free_for_two = state(used=98)
    assert [one.id for one in fitting_together(free_for_two, FULL, [holder], 0)] == ["a"]
    holder.blocks = [1, 2]
    assert not fitting_together(free_for_two, FULL, [holder], 0)


def test_a_bounded_number_of_requests_is_asked() -> None:
    many = [waiting(f"r-{n}", 1) for n in range(MOST_ASKED_BEHIND + 1)]
    roomy = state(used=0, total=1000)
    assert len(fitting_together(roomy, EngineDescription(), many, 0)) == MOST_ASKED_BEHIND
    assert len(fitting_together(roomy, EngineDescription(max_num_seqs=999), many, 0)) == MOST_ASKED_BEHIND


def test_blocks_to_run_are_those_of_the_whole_context_unless_layers_keep_only_a_window() -> None:
    preempted = waiting("a", 3, output_tokens=5, blocks_needed=2, blocks_to_admit=4)
    windowed = EngineDescription(groups=[KVGroup(), KVGroup("sliding_window", window=64)])
    assert blocks_to_run(state(), FULL, preempted) == 5  # 12 and 5 tokens, in blocks of 4
    assert blocks_to_run(state(), windowed, preempted) == 4
    unknown = state()
    unknown.block_size = 0
    assert blocks_to_run(unknown, FULL, preempted) == 4


def test_a_head_is_short_of_blocks_if_it_was_refused_for_blocks_that_the_pool_has() -> None:
    assert is_short_of_blocks(state(), head(needed=100, free=99))
    assert not is_short_of_blocks(state(), head(needed=101, free=99))  # it never fits, which is another finding
    assert not is_short_of_blocks(state(), head(needed=40, free=40))
    assert not is_short_of_blocks(state(), head(cause=Cause.MAX_NUM_SEQS))


@pytest.mark.parametrize(
    ("cause", "passed_over_at", "left_out"),
    [(Cause.BEHIND_HEAD, 9, False), (Cause.BEHIND_HEAD, 3, True), (Cause.REMOTE_KV, 9, True)],
)
def test_a_ready_request_that_stands_behind_the_head_by_the_engines_word_was_not_left_out(
    cause: Cause, passed_over_at: int, left_out: bool
) -> None:
    """Before it was ready, that says nothing of its turn."""
    ready = waiting("ready", ready_ns=S, ready_at=5, cause=cause, passed_over_at=passed_over_at)
    later = head(name="later one")
    later.arrived_ns = 2 * S
    assert was_left_out(ready, later) is left_out


@pytest.mark.parametrize(("arrived_s", "passed_over_at", "left_out"), [(1, 9, True), (1, 3, False), (3, 9, False)])
def test_a_request_that_came_before_the_head_is_left_out_if_it_was_ready_when_the_head_was_refused(
    arrived_s: int, passed_over_at: int, left_out: bool
) -> None:
    """It became ready only after the head had come."""
    ready = waiting("ready", arrived_ns=arrived_s * S, ready_ns=4 * S, ready_at=5)
    first = head(name="the head")
    first.arrived_ns, first.passed_over_at = 2 * S, passed_over_at
    assert was_left_out(ready, first) is left_out


def test_a_request_that_never_waited_for_anything_outside_is_not_left_out() -> None:
    first = head()
    first.arrived_ns = 2 * S
    assert not was_left_out(waiting("other", arrived_ns=S), first)


def test_a_ready_request_is_behind_no_head() -> None:
    first, ready, other = head(), waiting("ready", ready_ns=S, arrived_ns=S), waiting("other", arrived_ns=S)
    behind = requests_behind(sort_living([first, ready, other]), first)
    assert [record.id for record in behind] == ["other"]
