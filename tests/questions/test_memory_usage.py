"""The bill of an engine's memory, and what a load asks of its pool."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvscope.monitor.base.errors import BadQuestion, NotKnown
from kvscope.monitor.contract.description import EngineDescription
from kvscope.monitor.contract.kinds import Kind
from kvscope.monitor.contract.samples import Fact
from kvscope.monitor.contract.wire import Run, batch_of
from kvscope.monitor.ledger.memory_breakdown import breakdown_of, parts
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.log_file import read_log
from tests.detectors.scenes import ENGINE, Watched
from tests.questions.test_retained_blocks import busy

GIB = 1 << 30
DATA = Path(__file__).parent.parent / "data"


def with_breakdown(**breakdown: int) -> Watched:
    """An engine that has said what its device's memory went to; what is not named is not known."""
    scene = Watched()
    scene.steps(2)
    names = (
        "device_total",
        "device_free",
        "used_here",
        "used_by_others",
        "weights",
        "activations_peak",
        "graphs_estimated",
        "graphs_actual",
        "non_torch",
        "kv_pool",
        "allocator_reserved",
        "allocator_allocated",
        "fit_requested",
        "use_all",
    )
    last = scene.lab.frames[-1]
    event = Run(Kind.MEMORY, 0, -1, [breakdown.get(name, -1) for name in names], [])
    scene.watch.feed(
        [batch_of(ENGINE, last.epoch, [event], sequence=last.sequence + 1, wall_ns=last.wall_ns, mono_ns=last.mono_ns)]
    )
    return scene


def test_the_parts_add_up_to_the_device() -> None:
    scene = with_breakdown(
        device_total=80 * GIB,
        device_free=4 * GIB,
        used_by_others=2 * GIB,
        weights=30 * GIB,
        activations_peak=3 * GIB,
        graphs_actual=GIB,
        non_torch=GIB,
        kv_pool=36 * GIB,
    )
    view = scene.watch.memory(ENGINE)
    assert sum(view.parts.values()) == view.measured["device_total"] == 80 * GIB
    assert view.parts["not named"] == 3 * GIB
    assert view.usable_blocks == scene.lab.pool.usable


def test_a_bill_that_is_not_whole_has_no_parts() -> None:
    view = with_breakdown(kv_pool=36 * GIB).watch.memory(ENGINE)
    assert (view.parts, view.unattributed, view.measured) == ({}, None, {"kv_pool": 36 * GIB})
    with pytest.raises(NotKnown, match="the memory of the device needs a MEMORY event"):
        busy(1).watch.memory(ENGINE)


def test_the_bill_of_a_log() -> None:
    """An engine that is known by its log alone."""
    _, records = read_log(DATA / "seed-002.log")
    facts = [record for record in records if isinstance(record, Fact)]
    watch = Pipeline()
    watch.feed(records)
    (engine,) = watch.engines()
    breakdown, _ = breakdown_of(facts)
    view = watch.memory(engine.engine)
    assert view.parts == parts(breakdown)
    assert sum(view.parts.values()) == view.measured["device_total"] == breakdown.device_total
    with pytest.raises(NotKnown, match="a plan needs the number of blocks and their size"):
        watch.calculator(engine.engine, 10, 10)


@pytest.mark.parametrize("window", [None, 1, 7, 50])
def test_the_calculator_is_the_engines_own_sum(window: int | None) -> None:
    """What a request needs to finish, by the event of its arrival."""
    rng = random.Random(window)
    scene = Watched(total=4_000, block_size=4, window=window, max_num_batched_tokens=32)
    for _ in range(20):
        request = scene.lab.arrive(rng.randint(1, 400), max_tokens=rng.randint(1, 400))
        scene.steps(1)
        record = scene.ledger.request(request.id)
        assert record is not None
        view = scene.watch.calculator(ENGINE, record.prompt_tokens, record.max_tokens)
        assert view.blocks_per_request == record.blocks_to_finish


def test_as_many_as_it_says_run_together_without_a_preemption() -> None:
    scene = Watched(total=65, block_size=4, max_num_seqs=64, max_num_batched_tokens=4096, prefix_caching=False)
    view = scene.watch.calculator(ENGINE, 20, 20, 6)
    assert (view.fits, view.blocks_needed) == (True, 6 * view.blocks_per_request)
    assert not scene.watch.calculator(ENGINE, 20, 20, view.max_concurrency + 1).fits
    for _ in range(view.max_concurrency):
        scene.lab.arrive(20, max_tokens=20)
    scene.steps(2)
    assert len(scene.lab.scheduler.running) == view.max_concurrency
    scene.run_until_idle()
    assert not scene.ledger.state.totals.preemptions
    assert not scene.ledger.state.totals.allocation_failures


def test_what_else_stands_in_the_way_is_said() -> None:
    scene = Watched(total=650, max_num_seqs=3)
    scene.steps(1)
    view = scene.watch.calculator(ENGINE, 20, 20)
    assert view.max_concurrency == 3
    assert any("max_num_seqs allows 3" in note for note in view.notes)
    assert any("share a prefix" in note for note in view.notes)
    scene.ledger.description = EngineDescription(max_model_len=30)
    assert any("max_model_len is 30" in note for note in scene.watch.calculator(ENGINE, 20, 20).notes)
    for wrong in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(BadQuestion, match="each 1 or more"):
            scene.watch.calculator(ENGINE, *wrong)
