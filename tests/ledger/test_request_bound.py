"""A bound on the requests of one engine: frames that name more, and what a judgement of many costs."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base import limits
from kvscope.monitor.contract.kinds import Kind
from kvscope.monitor.contract.wire import Batch, NotAFrame, Run, batch_of, decode, encode
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.keyframe_codec import dump_state, load_state
from kvscope.monitor.ledger.records import RequestState
from kvscope.monitor.questions.pipeline import Pipeline

FIRST = 1_000
S = 1_000_000_000


def work(lab: Lab, steps: int, seconds: float = 0.1) -> list[Batch]:
    """The batches of so many steps, each so long after the one before it, behind those of the start."""
    before = len(lab.frames) if lab.frames[-1].sequence else 0
    for _ in range(steps):
        lab.clock.ns += round(seconds * S)  # type: ignore[attr-defined]
        lab.arrive(8, max_tokens=2)
        lab.step()
        lab.flush()
    return [frame for frame in lab.frames[before:] if isinstance(frame, Batch)]


def naming(kind: Kind, numbers: Iterable[int], last: Batch) -> Batch:
    """The batch after `last`, with one event of each of these requests."""
    args = {Kind.ARRIVED: [1, 8, 2, 0, 1, 2], Kind.PREEMPTED: [0, 0, 0]}[kind]
    runs = [Run(kind, 0, number, args, []) for number in numbers]
    place = {"sequence": last.sequence + 1, "wall_ns": last.wall_ns + 1, "mono_ns": last.mono_ns + 1}
    made = decode(encode(batch_of(last.engine, last.epoch, runs, **place)))
    assert isinstance(made, Batch)
    return made


def after(batches: Iterable[Batch], more: int) -> list[Batch]:
    """The batches with `more` before them."""
    return [msgspec.structs.replace(batch, sequence=batch.sequence + more) for batch in batches]


@pytest.mark.parametrize("kind", [Kind.ARRIVED, Kind.PREEMPTED])
def test_a_batch_that_names_more_requests_than_a_ledger_keeps_is_lost_and_told(kind: Kind) -> None:
    lab, watch = Lab(), Pipeline()
    first = work(lab, 5)
    watch.feed(first)
    (ledger,) = watch.fleet.engines.values()
    known = len(ledger.state.requests)
    watch.feed([naming(kind, range(FIRST, FIRST + limits.ENGINE_LEDGER_REQUESTS + 1), first[-1])])
    assert len(ledger.state.requests) == known
    watch.feed(after(work(lab, 20, 0.6), 1))
    assert sum(ledger.lost_batches.values()) == 1
    (gap,) = (finding for finding in watch.findings("firing") if finding.code == "blind.stream-gap")
    (why,) = (one.value for one in watch.finding(gap.id).finding.evidence if one.name == "unreadable_batch")
    assert f"a ledger has {limits.ENGINE_LEDGER_REQUESTS:,} at most" in str(why)
    assert ledger.state.totals.arrived >= 20  # it goes on


def test_a_keyframe_of_more_requests_is_refused() -> None:
    lab = Lab()
    ledger = EngineLedger("lab")
    for frame in work(lab, 3):
        ledger.apply(frame)
    state, record = ledger.state, RequestState(FIRST, "")
    for number in range(FIRST, FIRST + limits.ENGINE_LEDGER_REQUESTS + 1):
        state.requests[number] = record
    with pytest.raises(NotAFrame, match="a ledger has 131,072 at most"):
        load_state(memoryview(dump_state(state)))


class Counting(Pipeline):
    """Counts its judgements."""

    judged = 0

    def _judge(self, ledger: EngineLedger) -> None:
        self.judged += 1
        super()._judge(ledger)


def test_many_requests_are_judged_less_often() -> None:
    counts = []
    for waiting in (0, 30_000):  # 1.2 s between two judgements instead of half a second
        lab, watch = Lab(), Counting()
        first = work(lab, 2)
        watch.feed([*first, naming(Kind.ARRIVED, range(FIRST, FIRST + waiting), first[-1])])
        watch.judged = 0
        watch.feed(after(work(lab, 12, 0.6), 1))
        counts.append(watch.judged)
    assert counts == [12, 6]
