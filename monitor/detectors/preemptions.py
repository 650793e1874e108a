"""The shared parts of the detectors of preemptions: the recent ones, their passes, and the cost of a pass."""

from __future__ import annotations

from bisect import bisect_left
from itertools import groupby

from kvscope.monitor.detectors.judgement import Evidence
from kvscope.monitor.events.kinds import Preempt
from kvscope.monitor.ledger.engine_ledger import EngineLedger, Point
from kvscope.monitor.state.records import Preemption

RESET_REASON = int(Preempt.RESET)  # as a plain number: it is compared with thousands of reasons
LOST_EVENTS = "the lost events"


def recent_preemptions(ledger: EngineLedger, seconds: float) -> list[Preemption]:
    """Return the preemptions of the last `seconds` that were made for want of room, the first one first."""
    since = ledger.now_ns - seconds * 1e9 - ledger.wall(1) + 1  # on the engine's monotonic clock, as they are
    made = list(ledger.preempted)
    first = bisect_left(made, since, key=lambda one: one.at_ns)
    return [one for one in made[first:] if one.reason != RESET_REASON]


def preemption_passes(preempted: list[Preemption]) -> list[list[Preemption]]:
    """Group the preemptions by the scheduler's passes."""
    return [list(together) for _, together in groupby(preempted, key=lambda one: one.at_ns)]


def preempted_names(preempted: list[Preemption]) -> tuple[str, ...]:
    """Return the requests that were preempted, each once, in order."""
    return tuple(dict.fromkeys(one.id for one in preempted))


def point_at(ledger: EngineLedger, wall_ns: float) -> Point:
    """Return the first point of this epoch that is no earlier than `wall_ns`, or the last there is."""
    points = ledger.points
    return points[min(bisect_left(points, max(wall_ns, ledger.epoch), key=lambda point: point.at_ns), len(points) - 1)]


def freed_nothing(together: list[Preemption]) -> bool:
    """Return whether not one block was freed between the first and the last preemption of a pass."""
    return together[-1].released == together[0].released and sum(one.blocks for one in together[:-1]) > 0


def cost_of(ledger: EngineLedger, last: list[Preemption]) -> tuple[Evidence, ...]:
    """Return the evidence of what a pass preempted, and what that took."""
    first_at, last_at = ledger.at(last[0].at), ledger.at(last[-1].at)
    return (
        Evidence("preempted_in_one_pass", len(last), "requests", position=last_at),
        Evidence("running_before", last[0].running, "requests", position=first_at),
        Evidence("blocks_preempted", sum(one.blocks for one in last), "blocks", position=last_at),
        Evidence("tokens_lost", sum(one.tokens_lost for one in last), "tokens", position=last_at),
    )
