"""collapse.lockstep groups only what ended recently, and finds the bursts that it would find among all requests."""

import random
from bisect import bisect_right

from kvscope.monitor.contract.kinds import Status
from kvscope.monitor.detectors.collapse.lockstep import ended_since_pause
from kvscope.monitor.ledger.records import RequestState


def ends(times: list[int], status: Status = Status.FINISHED_STOPPED) -> list[RequestState]:
    return [RequestState(number, str(number), status=status, finished_ns=time) for number, time in enumerate(times)]


def recent(times: list[int], since_ns: int) -> list[int]:
    return [record.finished_ns for record in ended_since_pause(ends(times), since_ns, 10)]


def bursts(times: list[int]) -> list[tuple[int, ...]]:
    found, first = [], 0
    while first < len(times):
        after = bisect_right(times, times[first] + 10, first)
        found.append(tuple(times[first:after]))
        first = after
    return found


def test_recent_bursts_are_those_among_all() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        times = [0]
        while len(times) < rng.randint(1, 80):
            times.append(times[-1] + rng.choice((0, 1, 3, 9, 10, 11, 40)))
        since = rng.randint(-5, times[-1] + 5)
        among_recent = [burst for burst in bursts(recent(times, since)) if burst[-1] > since]
        assert among_recent == [burst for burst in bursts(times) if burst[-1] > since], (seed, since)


def test_what_ended_before_a_pause_is_not_grouped_again() -> None:
    times = [*range(4_000), *range(10_000, 10_050)]
    assert recent(times, 10_020) == times[4_000:]
    assert recent(times, 20_000) == [], "nothing ended since"
    assert recent(list(range(5_000)), 4_990) == list(range(5_000)), "without a pause, the first request decides"


def test_aborted_requests_neither_count_nor_bridge_a_pause() -> None:
    natural, aborted = ends([0, 20]), ends([10], Status.FINISHED_ABORTED)
    ended = [natural[0], aborted[0], natural[1]]
    assert [record.finished_ns for record in ended_since_pause(ended, 15, 10)] == [20]


def test_ends_of_one_moment_stay_in_their_order() -> None:
    assert [record.number for record in ended_since_pause(ends([5, 5, 5]), 0, 10)] == [0, 1, 2]


def test_ends_before_the_pause_are_not_read() -> None:
    """Thousands of ends are remembered, and every judgement asks."""

    class CountedList(list[RequestState]):
        read = 0

        def __reversed__(self):  # type: ignore[no-untyped-def]
            for record in super().__reversed__():
                self.read += 1
                yield record

    remembered = CountedList(ends([*range(0, 4_000 * 100, 100), 1_000_000, 1_000_005]))
    assert len(ended_since_pause(remembered, 999_999, 10)) == 2
    assert remembered.read == 3
