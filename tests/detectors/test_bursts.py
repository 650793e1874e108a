"""collapse.lockstep groups only what ended recently, and finds the bursts that it would find among all requests."""

import random
from bisect import bisect_right

from kvscope.monitor.detectors.collapse.lockstep import first_of_burst


def bursts(times: list[int], first: int, within_ns: int) -> list[tuple[int, ...]]:
    found = []
    while first < len(times):
        after = bisect_right(times, times[first] + within_ns, first)
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
        recent = [burst for burst in bursts(times, first_of_burst(times, since, 10), 10) if burst[-1] > since]
        assert recent == [burst for burst in bursts(times, 0, 10) if burst[-1] > since], (seed, since)


def test_what_ended_before_a_pause_is_not_grouped_again() -> None:
    times = [*range(4_000), *range(10_000, 10_050)]
    assert first_of_burst(times, 10_020, 10) == 4_000
    assert first_of_burst(times, 20_000, 10) == len(times), "nothing ended since"
    assert first_of_burst(list(range(5_000)), 4_990, 10) == 0, "without a pause, the first request decides"
