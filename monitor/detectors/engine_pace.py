"""Times in the engine's own pace: of steps, and of transfers and grammars.

What takes seconds at 20 ms a step takes minutes at 30 s a step.

Transfers that were seen to end give the pace of transfers, in proportion to their blocks. While others that began
before end, one that still waits may stand behind them. Nothing in the stream separates a slow transfer from a lost one.
What does is the time that passes without an end: until it is long, the finding is information, and cannot tell the two
apart. The more transfers have ended, the less time is needed. Before several have ended, each must also have waited for
a minute, unless as many as show a pace hold half of the pool, which a request lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ..contract.kinds import EngineMode
from ..ledger.durations import ANOTHER_KIND, WaitHistory
from ..ledger.engine_ledger import EngineLedger
from .detector import Settings, Threshold

MIN_STEPS: Final = Threshold(
    3, "steps", "a step may be full, and the one after it: a request left out of three has been left out"
)
"""Shared by stuck.zero-token and the other codes that wait for a step."""


def mean_step_s(ledger: EngineLedger) -> float:
    """Return how long the steps of this epoch took on average, or 0 before the first."""
    totals = ledger.state.totals
    return totals.step_ns / totals.steps / 1e9 if totals.steps else 0.0


def at_pace_s(ledger: EngineLedger, settings: Settings, grace: Threshold, steps: Threshold = MIN_STEPS) -> float:
    """Return the pending period: `grace` in seconds, or the engine's own pace if that is longer."""
    return max(settings(grace), pace_s(ledger, settings, steps))


def pace_s(ledger: EngineLedger, settings: Settings, steps: Threshold = MIN_STEPS) -> float:
    """Return the seconds of so many steps, and at least of the longest step of this epoch or the one in flight."""
    since_ns = min((step.since_ns for step in ledger.state.in_flight.values()), default=0)
    in_flight_s = ledger.age_s(max(since_ns, ledger.step_times.completed_ns)) if since_ns else 0.0
    longest_s = max(ledger.step_times.longest_s, in_flight_s)
    return max(settings(steps) * mean_step_s(ledger), longest_s)


NO_TOKEN_S: Final = Threshold(5, "s", "a reader of a streamed answer notices a pause of five seconds as a fault")
TIMES_EXPECTED: Final = Threshold(
    3, "times", "of the slowest recent step: a request may miss the step after a full one, and not the one after that"
)
EARLY_STEPS: Final = Threshold(20, "steps", "the first ones may load, compile and capture, and show no pace")
EARLY_S: Final = Threshold(20, "s", "before the engine has shown a pace: a kernel takes seconds to compile")


def without_token_s(ledger: EngineLedger, settings: Settings) -> float:
    """Return for how long a request that runs may get no token, by the engine's own pace. Beyond, it stands still."""
    least = settings(EARLY_S) if ledger.step_times.count < settings(EARLY_STEPS) else settings(NO_TOKEN_S)
    slowest_s = max((seconds for _, seconds in ledger.step_times.steps), default=0.0)
    return max(least, settings(TIMES_EXPECTED) * slowest_s)


HELD_GRACE_S: Final = Threshold(
    10, "s", "a transfer of one request's KV takes milliseconds to seconds. If there is a lease, it counts instead"
)
TIMES_LONGEST_WAIT: Final = Threshold(
    ANOTHER_KIND,
    "times",
    "what takes three times as long as the longest that ended, in proportion to its size, is another kind",
)
UNSEEN_TIMES: Final = Threshold(
    6,
    "times its grace",
    "until then a first transfer is information: the 42 GB of 128k tokens of a 70B model take 34 s at 10 Gbit/s",
)
"""A threshold of leak.finished-held, and of all waits for a transfer."""
UNSEEN_TOGETHER_S: Final = Threshold(
    600,
    "s",
    "until all together have waited for so long, a slow transfer is as likely as a lost one: ten minutes are a timeout"
    " for most clients. Divided by one more than the transfers that ended, since of n + 1 alike one is the longest",
)
"""A threshold of leak.finished-held, and of all waits for a transfer."""
FEWEST_SEEN: Final = Threshold(
    9, "transfers", "of ten alike the last is the longest in one case of ten: so many show what is usual"
)
"""A threshold of leak.finished-held, and of all waits for a transfer."""
UNPROVEN_SHARE: Final = Threshold(
    0.5, "of the pool", "half of the load has no room left: a link that slow is rarer than transfers that never end"
)
"""A threshold of leak.finished-held, for first transfers that a request waits for."""
MORE_TIME: Final = "more time: so far a slow transfer looks the same"


class OutsideWaitLimit(NamedTuple):
    """Since when a wait has been without a sign of progress (monotonic), and how many seconds it may be.

    information_s: how long each wait that may be a slow transfer is information, 0 once enough have shown the pace.
    together_s: how long all of them together are.
    """

    still_since_ns: int
    allowed_s: float
    information_s: float = 0.0
    together_s: float = 0.0


def outside_wait_limit(
    ledger: EngineLedger, settings: Settings, history: WaitHistory, grace: Threshold, began_ns: int, blocks: int = 0
) -> OutsideWaitLimit:
    """Return how long one that began then may take. blocks: of a transfer, 0 for a grammar."""
    least = at_pace_s(ledger, settings, grace)
    # The end of a transfer is reported between steps, so a slow step comes on top of it.
    unseen_s = settings(UNSEEN_TIMES) * settings(HELD_GRACE_S)
    information_s = together_s = 0.0
    if blocks and unseen_s:
        few = len(history.ended) < settings(FEWEST_SEEN)
        information_s = unseen_s + pace_s(ledger, settings) if few else 0.0
        together_s = settings(UNSEEN_TOGETHER_S) / (len(history.ended) + 1)
    if not history.ended:
        return OutsideWaitLimit(began_ns, least, information_s, together_s)
    longest = settings(TIMES_LONGEST_WAIT) * history.longest_s(blocks)
    return OutsideWaitLimit(history.still_since_ns(began_ns), max(least, longest), information_s, together_s)


def may_be_slow(waits: Sequence[tuple[float, OutsideWaitLimit]], many: bool = False) -> bool:
    """Return whether transfers that have waited for so many seconds may all be slow. many: so many wait that their
    number shows what a minute for each would.
    """
    together = sum(seconds for seconds, _ in waits) < min((limit.together_s for _, limit in waits), default=0.0)
    return together or (not many and all(seconds < limit.information_s for seconds, limit in waits))


def taken_up_until_ns(ledger: EngineLedger) -> int:
    """Return the last time, on the engine's clock, at which it could have taken up the end of a wait: when it was last
    seen. While its operator has it paused, and until its first pass after that, that is its last pass.
    """
    if ledger.state.mode != EngineMode.UNPAUSED or ledger.looked_ns < ledger.state.mode_since_ns:
        return ledger.looked_ns
    return ledger.last_received_ns - ledger.wall(1) + 1
