"""How long a transfer or a grammar may take, by the engine's own earlier ones.

Transfers that were seen to end give the pace, in proportion to their blocks. While others that began before end, one
that still waits may stand behind them. Before several have ended, nothing in the stream separates a slow transfer from
a lost one: for a minute such a finding is information, and cannot tell the two apart. Where none has ended of as many
as show a pace, and these hold half of the pool, which a request lacks, a leak is the likelier of the two.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvscope.monitor.detectors.engine_pace import at_pace_s, pace_s
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.events.kinds import EngineMode
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.outside_waits import ANOTHER_KIND, WaitHistory

HELD_GRACE_S: Final = Threshold(
    10,
    "s",
    "a transfer of one request's KV takes milliseconds to seconds. If there is a lease, it counts instead",
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
FEWEST_SEEN: Final = Threshold(
    9, "transfers", "of ten alike the last is the longest in one case of ten: so many show what is usual"
)
"""A threshold of leak.finished-held, and of all waits for a transfer."""
UNPROVEN_SHARE: Final = Threshold(
    0.5, "of the pool", "half of the load has no room left: a link that slow is rarer than transfers that never end"
)
"""A threshold of leak.finished-held, for first transfers that a request waits for."""
UNKNOWN_PACE: Final = "how long a transfer takes here: too few have ended, and a slow one looks the same"


class OutsideWaitLimit(NamedTuple):
    """Since when a wait has been without a sign of progress (monotonic), and how many seconds it may be.

    information_s: how long a wait that may be a slow transfer is information, 0 once enough have shown the pace.
    """

    still_since_ns: int
    allowed_s: float
    information_s: float = 0.0


def outside_wait_limit(
    ledger: EngineLedger, settings: Settings, history: WaitHistory, grace: Threshold, began_ns: int, blocks: int = 0
) -> OutsideWaitLimit:
    """Return how long one that began then may take. blocks: of a transfer, 0 for a grammar."""
    least = at_pace_s(ledger, settings, grace)
    # The end of a transfer is reported between steps, so a slow step comes on top of it.
    unseen_s = settings(UNSEEN_TIMES) * settings(HELD_GRACE_S)
    few = blocks and unseen_s and len(history.ended) < settings(FEWEST_SEEN)
    information_s = unseen_s + pace_s(ledger, settings) if few else 0.0
    if not history.ended:
        return OutsideWaitLimit(began_ns, least, information_s)
    longest = settings(TIMES_LONGEST_WAIT) * history.longest_s(blocks)
    return OutsideWaitLimit(history.still_since_ns(began_ns), max(least, longest), information_s)


def taken_up_until_ns(ledger: EngineLedger) -> int:
    """Return the last time, on the engine's clock, at which it could have taken up the end of a wait: when it was last
    seen. While its operator has it paused, and until its first pass after that, that is its last pass.
    """
    if ledger.state.mode != EngineMode.UNPAUSED or ledger.looked_ns < ledger.state.mode_since_ns:
        return ledger.looked_ns
    return ledger.last_received_ns - ledger.wall(1) + 1
