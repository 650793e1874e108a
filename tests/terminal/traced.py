"""Six incidents as their events tell them, and what these come to until the position that an item of evidence has."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, NamedTuple

from kvscope.monitor.base.text import listed
from kvscope.monitor.contract.kinds import Kind
from kvscope.monitor.detectors.registry import THRESHOLDS
from kvscope.monitor.questions.pipeline import Pipeline
from tests.terminal.golden import GOLDEN
from tests.terminal.plain import Asked, Plain, ReceivedRecords

Json = Any


class Reported(NamedTuple):
    """An incident: its events, what a watch knows of it, and what each command prints as JSON."""

    code: str
    events: list[ReceivedRecords]
    watch: Pipeline
    stated: dict[str, Json]
    now_ns: int
    known: dict[str, tuple[ReceivedRecords, Plain]]
    """By position, what was counted already."""

    def text(self, name: str) -> str:
        return (GOLDEN / f"{self.code}.{name}.txt").read_text().partition("\n")[2]

    def by(self, ns: int = 1 << 62) -> Plain:
        """What all that was packed until then (wall) comes to."""
        plain = Plain()
        for one in self.events:
            if one.packed_ns > ns:
                break
            plain.fold(one)
        return plain

    def at(self, position: str) -> tuple[ReceivedRecords, Plain]:
        """The event at a position, and what all until then come to."""
        if position not in self.known:
            plain = Plain()
            for one in self.events:
                plain.fold(one)
                if one.position == position:
                    self.known[position] = one, plain
                    break
        return self.known[position]


# -------------------------------------------------------------------- evidence


class Case(NamedTuple):
    """An item of evidence that is judged by its name: the finding it is of, the event at its position, and what all
    until then come to; and what was at the end.
    """

    finding: Json
    item: Json
    one: ReceivedRecords
    plain: Plain
    reported: Reported

    @property
    def culprits(self) -> list[Asked]:
        names = set(self.finding["culprits"]["requests"])
        return [each for each in self.plain.requests.values() if each.name in names]

    @property
    def a(self) -> list[int]:
        return self.one.event.args

    def kept(self) -> set[int]:
        return set().union(*(self.plain.kept.get(each.number, set()) for each in self.culprits))

    def without_output(self) -> list[int]:
        return [tokens for each in self.plain.requests.values() for tokens in each.without_output]

    def ago_s(self) -> float:
        return round((self.reported.now_ns - self.one.at_ns) / 1e9, 1)

    def of(self, *kinds: Kind) -> list[int]:
        """The event's arguments, which is of one of these kinds."""
        assert self.one.event.kind in kinds
        return self.a


def _share_of_pool(case: Case) -> float:
    blocks = len(case.kept()) if case.finding["code"] == "leak.finished-held" else case.plain.idle
    return round(blocks / case.plain.usable, 4)


def _blocks_needed(case: Case) -> int:
    args = case.of(Kind.ALLOCATION_FAILED, Kind.ARRIVED)
    return args[0] if case.one.event.kind == Kind.ALLOCATION_FAILED else args[4]


def _usage(case: Case) -> float:
    held = case.plain.held_by()
    return round(100 * (held["running"] + held["waiting"]) / case.plain.usable, 1)


def _collapses(case: Case) -> int:
    """Ends within a second of the first of them, of four or more that had half of the pool."""
    waves: list[list[tuple[int, int]]] = []
    for end in case.plain.ends:
        if waves and end[0] - waves[-1][0][0] <= THRESHOLDS["collapse.lockstep.within_s"].value * 1e9:
            waves[-1].append(end)
        else:
            waves.append([end])
    requests = case.plain.requests
    large = [wave for wave in waves if 2 * sum(requests[n].blocks_at_end for _, n in wave) >= case.plain.usable]
    return sum(len(wave) >= 4 for wave in large)


def _step_seconds(case: Case) -> list[float]:
    """How long the engine itself measured each step."""
    return sorted(one.event.args[2] / 1e9 for one in case.reported.events if one.event.kind == Kind.STEP_COMPLETED)


def _expected_step_s(case: Case) -> float:
    """The steps before it compute as much each: half of them take less."""
    steps = _step_seconds(case)
    return round(steps[len(steps) // 2], 3)


def _allowed_s(case: Case) -> float:
    """Steps are so quick that the least which the thresholds allow is what counts."""
    slower = THRESHOLDS["stuck.engine-stalled.slower_than_expected"].value
    grace_s = THRESHOLDS["stuck.engine-stalled.grace_s"].value
    assert slower * _expected_step_s(case) < grace_s / 2
    return grace_s


def _watchdog(case: Case) -> str:
    since = [case.plain.stalled[each.number][2] for each in case.culprits if each.number in case.plain.stalled]
    step = f"step {min(since)}" if min(since) >= 0 else "before any step"
    case.of(Kind.STALLED)
    return f"reports it too, for {len(since)} request, since {step}"


def _anomaly(case: Case) -> str:
    """The last that it names were released when they were free already."""
    blocks = [block for block in next(filter(None, reversed(case.plain.released_free))) if block in case.one.event.ids]
    case.of(Kind.RELEASED)
    return f"block{'s' if len(blocks) > 1 else ''} {listed(blocks)}, released while free (no reference was left)"


def _event_history(case: Case) -> str:
    event = case.one.event
    first = int(re.findall(r"blocks? (\d+)", case.finding["explanation"])[0])
    assert first in event.ids
    (name,) = (each.name for each in case.culprits if each.number == event.request)
    what = f"allocated to request {name}" if event.kind == Kind.ALLOCATED else f"released by request {name} (FINISHED)"
    return f"{_clock(case.one.at_ns)} {what}"


def _clock(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9).astimezone().isoformat()[11:19]


def _tokens_computed(case: Case) -> int:
    return case.plain.counts["computed_tokens"]


BORNE_OUT: Final[dict[str, Callable[[Case], float | str]]] = {
    "requests_held": lambda case: sum(bool(case.plain.kept.get(each.number)) for each in case.culprits),
    "blocks_held": lambda case: len(case.kept()),
    "share_of_pool": _share_of_pool,
    "oldest_age_s": lambda case: case.ago_s(),
    "prompt_tokens_held": lambda case: sum(each.prompt for each in case.culprits),
    "running": lambda case: len(case.plain.running()),
    "waiting": lambda case: len(case.plain.waiting()),
    "connector_polls": lambda case: case.of(Kind.HEARTBEAT)[8],
    "blocks_needed": _blocks_needed,
    "blocks_usable": lambda case: case.of(Kind.STARTED)[1] - case.a[2],
    "prompt_tokens": lambda case: case.of(Kind.ARRIVED)[1],
    "blocks_free": lambda case: case.plain.free,
    "waiting_behind": lambda case: sum(
        each.arrived >= case.culprits[0].arrived for each in case.plain.waiting() if each is not case.culprits[0]
    ),
    "times_passed_over": lambda case: case.culprits[0].passed_over,
    "engine_watchdog": _watchdog,
    "requests_finished_together": lambda case: sum(each.finished > 0 for each in case.culprits),
    "within_s": lambda case: round((case.one.at_ns - min(each.finished for each in case.culprits)) / 1e9, 3),
    "blocks_freed_by_finishing": lambda case: sum(each.blocks_at_end for each in case.culprits),
    "usage_before": _usage,
    "usage_after": _usage,
    "next_wave_waiting": lambda case: len(case.plain.waiting()),
    "next_wave_running": lambda case: len(case.plain.running()),
    "collapses_seen": _collapses,
    "preemptions": lambda case: case.plain.counts["preemptions"],
    "preemptions_without_output": lambda case: len(case.without_output()),
    "requests_preempted_without_output": lambda case: sum(
        bool(each.without_output) for each in case.plain.requests.values()
    ),
    "tokens_wasted": lambda case: sum(case.without_output()),
    "tokens_computed": _tokens_computed,
    "share_wasted": lambda case: round(sum(case.without_output()) / _tokens_computed(case), 4),
    "max_preemptions_per_request": lambda case: max(len(each.without_output) for each in case.plain.requests.values()),
    "stalled_s": lambda case: case.ago_s(),
    "allowed_s": _allowed_s,
    "expected_step_s": _expected_step_s,
    "longest_step_s": lambda case: round(_step_seconds(case)[-1], 3),
    "silent_s": lambda case: case.ago_s(),
    "step_in_flight": lambda case: case.of(Kind.STEP_LAUNCHED)[1],
    "tokens_in_flight": lambda case: sum(case.of(Kind.STEP_LAUNCHED)[2:]),
    "last_step": lambda case: case.of(Kind.STEP_COMPLETED)[1],
    "cached_idle_blocks": lambda case: case.plain.idle,
    "prefix_hit_rate": lambda case: case.plain.counts["hit_tokens"] / case.plain.counts["looked_up_tokens"],
    "anomalies": lambda case: sum(map(bool, case.plain.released_free)),
    "anomaly": _anomaly,
    "block_history": _event_history,
}
"""By the name of an item of evidence, what the events until its position come to."""
OF_ALL: Final = ("running", "waiting", "waiting_behind", "blocks_free", "collapses_seen")
"""The event by which the queue, the pool or a count became what it is may be about anybody; others are of culprits."""
