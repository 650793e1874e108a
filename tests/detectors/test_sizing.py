"""Sizes that are wrong, by name; and those that only look so."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from kvscope.engine.bench.simulated_engine import SimulatedEngine, StepTime
from kvscope.engine.config import EngineConfig
from kvscope.engine.execution.memory_plan import DEVICE_HEADROOM, Plan, Reading
from kvscope.engine.models import load_model
from kvscope.engine.requests.request import SamplingParams
from kvscope.monitor.contract.description import KVGroup
from kvscope.monitor.contract.kinds import Cause, Preempt, Release, Status
from kvscope.monitor.contract.samples import Fact
from kvscope.monitor.ledger.memory_breakdown import breakdown_of, fit_requested, rounding
from kvscope.monitor.sources.engine_log import Log
from kvscope.monitor.sources.recording import Recording
from tests.detectors.scenes import Observer, Spoken, recorded, value
from tests.engine.test_memory import TOKEN, breakdown_with_graphs

KV_TOO_SMALL = "sizing.kv-too-small"
BLOCK_INFLATED = "sizing.block-inflated"
ANY_SHARE = ["sizing.overreserved.min_share=0"]
"""Graphs of the CPU are a few KiB, of GiB."""


# -------------------------------------------------------------------- sizing.kv-too-small


def served(folder: Path, *faults: str) -> Observer:
    """Eight at once of 64 tokens each, in a pool that was to hold just these."""
    config = EngineConfig(
        block_size=4,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=(1 + 8 * 16) * 4 * TOKEN,
        faults=faults,
    )
    with closing(SimulatedEngine(config, load_model(config), journal=folder)) as engine:
        for n in range(16):
            engine.submit(f"r-{n}", [n] * 8, SamplingParams(max_tokens=56, ignore_eos=True))
        engine.run(20)
    observer = Observer()
    observer.watch.feed(Recording(folder))
    observer.watch.settle()
    return observer


def test_a_pool_of_a_sixth(tmp_path: Path) -> None:
    observer = served(tmp_path, KV_TOO_SMALL)
    finding = next(f for f in observer.firing() if f.code == KV_TOO_SMALL)
    assert finding.verdict == "confirmed"
    (ledger,) = observer.watch.fleet.engines.values()
    assert set(finding.culprits.requests) == {r.id for r in ledger.ended if r.preemptions}
    assert value(finding, "tokens_lost") == sum(one.tokens_lost for one in ledger.preempted)
    fits, usable = float(value(finding, "full_length_concurrency")), ledger.state.total - 1
    assert fits == round(usable / 16, 2) < 8
    assert any(f"--max-num-seqs to {int(fits)}" in text for text in finding.change)


def test_a_pool_that_holds_all_that_may_run(tmp_path: Path) -> None:
    observer = served(tmp_path)
    assert observer.alarms() == []


@pytest.mark.parametrize(("max_num_seqs", "fires"), [(9, True), (8, False)])
def test_preemptions_in_a_pool_that_holds_all_that_may_run_have_another_cause(max_num_seqs: int, fires: bool) -> None:
    """Of 32 blocks, a request of full length takes four."""
    explained = preempted_in_turns(max_num_seqs).watch.findings("suppressed")  # such preemptions are thrash
    assert any(finding.code == KV_TOO_SMALL for finding in explained) == fires


def preempted_in_turns(max_num_seqs: int, others_tokens: int = 0) -> Spoken:
    """Each of four requests loses its blocks six times, and another has so many tokens computed.

    A last one fills what they leave of the pool.
    """
    scene = Spoken(max_model_len=16, max_num_seqs=max_num_seqs)
    scene.arrive(10, list(range(10, 33)))
    if others_tokens:
        scene.arrive(9, [9])
    for turn in range(6):
        if others_tokens:
            scene.log.progressed([9], [others_tokens * (1 + turn) // 6], [turn])
        for number in range(4):
            blocks = [1 + 2 * number, 2 + 2 * number]
            if not turn:
                scene.log.arrived(number, f"r-{number}", 12, 8, 0, 3, 5)
            scene.log.allocated(number, blocks)
            scene.log.admitted(number, 0)
            scene.log.progressed([number], [8], [turn])
        scene.say()
        for number in range(4):
            scene.log.preempted(number, Preempt.KV_BLOCKS, -1, 2, 8)
            scene.log.released(number, [1 + 2 * number, 2 + 2 * number], Release.PREEMPTED)
        scene.wait(3)
    return scene


def preempted_beside(blocks: int, tokens: int, *, model_len: int = 64, kept_tokens: int = 0) -> Spoken:
    """Eight of 32 blocks are held by those that are preempted in turns, and so many by one that has so many tokens."""
    scene = Spoken(max_model_len=model_len, max_num_seqs=9)
    if blocks:
        scene.log.arrived(9, "r-9", tokens, 8, 0, blocks, blocks)
        scene.log.allocated(9, list(range(9, 9 + blocks)))
        scene.log.admitted(9, 0)
    for turn in range(6):
        for number in range(4):
            if not turn:
                scene.log.arrived(number, f"r-{number}", 7, 8, 0, 2, 4)
            scene.log.allocated(number, [1 + 2 * number, 2 + 2 * number])
            scene.log.admitted(number, kept_tokens if turn else 0)
            scene.log.progressed([number], [7], [1])
        scene.say()
        for number in range(4):
            scene.log.preempted(number, Preempt.KV_BLOCKS, -1, 2, 7)
            scene.log.released(number, [1 + 2 * number, 2 + 2 * number], Release.PREEMPTED)
        scene.wait(3)
    return scene


@pytest.mark.parametrize(
    ("filler_blocks", "filler_tokens", "found"),
    [
        (24, 92, f"{KV_TOO_SMALL} confirmed"),  # tokens fill the pool
        (12, 46, f"{KV_TOO_SMALL} likely"),  # two thirds of it: what asks for the rest at once?
        (0, 0, ""),  # a quarter of it, and the rest is free
        (24, 2, ""),  # less than half of it, and the rest is held without a token
    ],
)
def test_a_pool_is_too_small_only_if_tokens_fill_it_at_each_preemption(
    filler_blocks: int, filler_tokens: int, found: str
) -> None:
    scene = preempted_beside(filler_blocks, filler_tokens)
    assert sum(scene.ledger.state.totals.preemptions.values()) == 24
    told = [f"{f.code} {f.verdict}" for f in [*scene.firing(), *scene.watch.findings("suppressed")]]
    of_pool = [one for one in told if "held." not in one]
    if not found:
        assert not [one for one in of_pool if one.startswith(("sizing.", "thrash.", "collapse."))]
    assert [one for one in of_pool if one.startswith(KV_TOO_SMALL)] == [found] * bool(found)


def test_requests_that_hold_blocks_without_tokens_are_no_small_pool(tmp_path: Path) -> None:
    """A real vLLM that gives each request blocks for 512 tokens more than it has: of 139, tokens fill 49."""
    observer = recorded("slots-over-allocated", tmp_path)
    (ledger,) = observer.watch.fleet.engines.values()
    assert len(ledger.preempted) == 6
    assert KV_TOO_SMALL not in {finding.code for finding in observer.watch.findings()}


@pytest.mark.parametrize(("others_tokens", "fires"), [(1_500, True), (2_500, False)])
def test_preemptions_that_lose_less_than_a_tenth_of_the_work_are_no_want_of_size(
    others_tokens: int, fires: bool
) -> None:
    """24 preemptions lose 192 tokens, while another request has so many computed."""
    scene = preempted_in_turns(9, others_tokens)
    explained = scene.watch.findings("suppressed")
    assert any(finding.code == KV_TOO_SMALL for finding in [*explained, *scene.firing()]) is fires


@pytest.mark.parametrize(("pairs", "fires"), [(2, False), (4, True)])
def test_a_pool_too_small_for_two_in_slow_steps(tmp_path: Path, pairs: int, fires: bool) -> None:
    """Of each pair one is preempted, minutes apart: at two seconds a step, that is one life of a request."""
    config = EngineConfig(
        block_size=4, max_model_len=64, max_num_seqs=8, num_gpu_blocks_override=25, enable_prefix_caching=False
    )
    slow = StepTime(base_s=2.0, per_token_s=0.0, per_kv_token_s=0.0)
    with closing(SimulatedEngine(config, load_model(config), step_time=slow, journal=tmp_path)) as engine:
        for n in range(pairs):
            for name in ("a", "b"):
                engine.submit(f"{name}-{n}", [n] * 8, SamplingParams(max_tokens=56, ignore_eos=True))
            engine.run(210)
    observer = Observer()
    observer.watch.feed(Recording(tmp_path))
    observer.watch.settle()
    (ledger,) = observer.watch.fleet.engines.values()
    apart_s = [(two.at_ns - one.at_ns) / 1e9 for one, two in pairwise(ledger.preempted)]
    assert len(ledger.preempted) >= pairs
    assert min(apart_s) > 60
    assert any(finding.code == KV_TOO_SMALL for finding in observer.firing()) == fires


@pytest.mark.parametrize(("blocks", "fires"), [(60, True), (400, False)])
def test_a_pool_too_small_for_several_groups(tmp_path: Path, blocks: int, fires: bool) -> None:
    """How many full-length requests fit depends on the layers' windows: preemptions show that those here do not."""
    config = EngineConfig(block_size=4, max_model_len=64, max_num_seqs=8, num_gpu_blocks_override=blocks)
    loaded = load_model(config)
    layers = frozenset(range(1, loaded.config.num_layers))
    model = replace(loaded, config=replace(loaded.config, sliding_window=24, sliding_layers=layers))
    with closing(SimulatedEngine(config, model, journal=tmp_path)) as engine:
        for n in range(16):
            engine.submit(f"r-{n}", [n] * 8, SamplingParams(max_tokens=56, ignore_eos=True))
        engine.run(20)
    observer = Observer()
    observer.watch.feed(Recording(tmp_path))
    observer.watch.settle()
    found = [finding for finding in observer.firing() if finding.code == KV_TOO_SMALL]
    assert bool(found) == fires
    for finding in found:
        assert finding.verdict == "confirmed"
        assert "for 2 KV cache groups" in finding.explanation
        assert "full_length_concurrency" not in {item.name for item in finding.evidence}


# -------------------------------------------------------------------- the bill


@cache
def plan_with_graphs(fault: str = "", share: float = 0.9) -> tuple[Plan, int]:
    return breakdown_with_graphs(share, (fault,) if fault else ())


def reported(plan: Plan, free: int, *settings: str, total: int = 0) -> Spoken:
    """An engine of that plan, of whose device so much is free."""
    scene = Spoken(settings=[*ANY_SHARE, *settings], kv_bytes_per_block=TOKEN)
    total = total or plan.total
    scene.log.memory(plan.event(Reading(total, free, total - free, 0)))
    scene.say()
    return scene


def in_use(plan: Plan) -> int:
    """All that the bill names."""
    return plan.weights + plan.activations + plan.non_torch + plan.graphs + plan.kv_pool


@pytest.mark.parametrize("share", [0.9, 1.0])
def test_a_sound_bill(share: float) -> None:
    plan, _ = plan_with_graphs(share=share)
    assert reported(plan, plan.total - in_use(plan)).alarms() == []


def test_graphs_for_which_nothing_was_kept() -> None:
    code = "sizing.kv-too-large"
    plan, free = plan_with_graphs(code, share=1.0)
    finding = reported(plan, free).only(code)
    assert finding.verdict == "confirmed"
    assert value(finding, "graphs_actual") == plan.graphs
    assert value(finding, "graphs_reserved") == 0
    smaller = plan.kv_pool - plan.graphs - DEVICE_HEADROOM
    assert f"--kv-cache-memory-bytes {max(smaller, 0)}," in finding.change[0]
    assert reported(plan, DEVICE_HEADROOM).alarms() == []


def test_an_estimate_that_adds_up_what_is_shared() -> None:
    code = "sizing.overreserved"
    plan, _ = plan_with_graphs(code)
    finding = reported(plan, plan.total - in_use(plan)).only(code)
    assert finding.verdict == "confirmed"
    assert value(finding, "graphs_reserved_unused") == plan.graphs_estimated - plan.graphs
    assert reported(plan, plan.total - in_use(plan), f"{code}.min_share=0.01").alarms() == []


def test_advice_that_subtracts_graphs_twice() -> None:
    code = "sizing.bad-suggestion"
    plan, _ = plan_with_graphs(code)
    finding = reported(plan, plan.total - in_use(plan)).only(code)
    assert (finding.verdict, "share" in finding.missing) == ("likely", True)
    assert value(finding, "computed_kv_cache") == plan.kv_pool
    assert value(finding, "suggested_kv_cache") == plan.fit_requested
    assert f"--kv-cache-memory-bytes {plan.kv_pool}." in finding.change[0]


@pytest.mark.parametrize("others", [True, False])
def test_memory_that_no_line_names(others: bool) -> None:
    code = "sizing.elsewhere"
    plan, _ = plan_with_graphs()
    unnamed = plan.total // 10
    here = in_use(plan) + (0 if others else unnamed)
    scene = Spoken(kv_bytes_per_block=TOKEN)
    scene.log.memory(plan.event(Reading(plan.total, plan.total - in_use(plan) - unnamed, here, others * unnamed)))
    scene.say()
    finding = scene.only(code)
    assert finding.verdict == "confirmed"
    assert value(finding, "unattributed_memory") == unnamed
    assert ("other processes" in finding.explanation) == others
    scene.log.memory(plan.event(Reading(plan.total, plan.total - in_use(plan), in_use(plan), 0)))
    scene.wait(5)
    scene.wait(5)
    assert not scene.firing(code)


def test_what_a_container_does_not_tell_is_likely() -> None:
    plan, _ = plan_with_graphs()
    scene = Spoken()
    reserved = plan.weights + plan.graphs + plan.kv_pool + plan.activations
    scene.log.memory(plan.event(Reading(plan.total, 0, -1, -1, reserved, reserved)))
    scene.say()
    finding = scene.only("sizing.elsewhere")
    assert finding.verdict == "likely"
    assert "processes" in finding.missing


def test_tensors_that_are_kept_in_the_allocator() -> None:
    """All of it is torch's, so none is elsewhere by the device's figures."""
    plan, _ = plan_with_graphs()
    parts = plan.weights + plan.graphs + plan.kv_pool + plan.activations
    kept = plan.total // 10
    free = plan.total - parts - kept - plan.non_torch
    scene = Spoken()
    scene.log.memory(plan.event(Reading(plan.total, free, plan.total - free, 0, parts + kept, parts + kept)))
    scene.say()
    assert value(scene.only("sizing.elsewhere"), "unattributed_memory") == kept


# -------------------------------------------------------------------- the bill in a log

SEED = (Path(__file__).parent.parent / "data" / "seed-002.log").read_text()


def read(text: str) -> tuple[Observer, list[Fact]]:
    records = list(Log("a.log", datetime(2026, 11, 21, tzinfo=UTC)).records(text.splitlines()))
    observer = Observer()
    observer.watch.feed(records)
    observer.watch.settle()
    return observer, [record for record in records if isinstance(record, Fact)]


def test_the_bill_of_a_real_log_is_sound() -> None:
    """It is over its share by the graphs, with much free beside: no harm."""
    assert read(SEED)[0].alarms() == []


def test_advice_in_a_log_is_held_against_the_sums_of_its_own_bill() -> None:
    _, facts = read(SEED)
    breakdown = breakdown_of(facts)[0]
    (advised,) = re.findall(r"--kv-cache-memory=(\d+)` to fit", SEED)
    wrong = int(advised) - breakdown.graphs
    observer, _ = read(SEED.replace(advised, str(wrong)))
    finding = observer.only("sizing.bad-suggestion")
    assert finding.verdict == "confirmed"
    assert value(finding, "suggested_kv_cache") == wrong
    assert value(finding, "computed_kv_cache") == fit_requested(breakdown).kv_cache_memory
    slightly = int(advised) - rounding(breakdown) // 4
    assert read(SEED.replace(advised, str(slightly)))[0].alarms() == []


def test_an_estimate_in_a_log() -> None:
    estimate = "\nCUDA graph pool memory: 0.65 GiB (actual), 9.20 GiB (estimated), difference: 8.55 GiB (1315%)."
    finding = read(SEED + estimate)[0].only("sizing.overreserved")
    assert finding.verdict == "confirmed"
    assert {evidence.source for evidence in finding.evidence} == {"log"}


def test_a_bill_that_is_not_whole_says_nothing() -> None:
    assert read(SEED.partition("Actual usage")[0])[0].alarms() == []


# -------------------------------------------------------------------- sizing.block-inflated


@pytest.mark.parametrize("tokens", [1, 3])
def test_blocks_that_are_mostly_empty(tokens: int) -> None:
    """Eight requests of `tokens` have a block of four in each of two KV groups, in a pool of 17."""
    groups = [KVGroup("full_attention", 4), KVGroup("mamba", 12)]
    scene = Spoken(18, settings=[f"{BLOCK_INFLATED}.min_block=4"], groups=groups)
    for number in range(8):
        scene.arrive(number, [1 + 2 * number, 2 + 2 * number])
    scene.log.progressed(list(range(8)), [tokens] * 8, [1] * 8)
    scene.say()
    if tokens > 2:
        assert scene.alarms() == []
        return
    finding = scene.only(BLOCK_INFLATED)
    assert finding.culprits.requests == [f"r-{number}" for number in range(8)]
    assert value(finding, "tokens_in_blocks") == 8 * tokens
    assert value(finding, "tokens_reserved") == 8 * 4


@pytest.mark.parametrize(("requests", "inflated"), [(3, False), (4, True)])
def test_four_requests_with_mostly_empty_blocks_represent_the_load(requests: int, inflated: bool) -> None:
    scene = Spoken(1 + requests, settings=[f"{BLOCK_INFLATED}.min_block=4"], groups=[KVGroup("mamba", 12)])
    for number in range(requests):
        scene.arrive(number, [1 + number])
    scene.log.progressed(list(range(requests)), [1] * requests, [1] * requests)
    scene.say()
    assert bool(scene.firing(BLOCK_INFLATED)) is inflated


def test_empty_blocks_that_no_request_is_short_of_are_information() -> None:
    scene = Spoken(18, settings=[f"{BLOCK_INFLATED}.min_block=4"], groups=[KVGroup("mamba", 12)])
    for number in range(9):
        scene.arrive(number, [1 + number])
    scene.log.progressed(list(range(9)), [1] * 9, [1] * 9)
    scene.say()
    (finding,) = scene.firing(BLOCK_INFLATED)
    assert (finding.severity, finding.verdict) == ("info", "confirmed")
    scene.log.arrived(9, "r-9", 36, 8, 0, 9, 11)
    scene.log.queued(9, Cause.NEW, at_front=False)
    scene.log.allocation_failed(9, 9, 8)
    scene.log.not_scheduled(9, Cause.KV_BLOCKS, 1)
    scene.say()
    assert scene.only(BLOCK_INFLATED).severity == "warning"


@pytest.mark.parametrize("lost", [8, 9])
def test_a_pool_that_is_full_of_other_blocks_is_not_short_for_the_size_of_these(lost: int) -> None:
    """Eight of 17 blocks are mostly empty. What fills the others, such as a leak, is why none is free."""
    scene = Spoken(9 + lost, settings=[f"{BLOCK_INFLATED}.min_block=4"], groups=[KVGroup("mamba", 12)])
    scene.arrive(0, list(range(9, 9 + lost)))
    for number in range(1, 9):
        scene.arrive(number, [number])
    scene.log.progressed(list(range(9)), [4 * lost, *[1] * 8], [0, *[1] * 8])
    scene.log.finished(0, Status.FINISHED_ABORTED)
    scene.say()
    assert bool(scene.firing(BLOCK_INFLATED)) is (lost == 8)


def test_blocks_that_a_step_is_about_to_fill_are_not_inflated() -> None:
    """They are taken when the step is planned, and nothing is in them until it has ended."""
    groups = [KVGroup("full_attention", 4), KVGroup("mamba", 12)]
    scene = Spoken(18, settings=[f"{BLOCK_INFLATED}.min_block=4"], groups=groups)
    for number in range(8):
        scene.arrive(number, [1 + 2 * number, 2 + 2 * number])
    scene.say()
    assert scene.alarms() == []


def test_blocks_of_a_usual_size_are_not_inflated() -> None:
    scene = Spoken(18)
    for number in range(8):
        scene.arrive(number, [1 + 2 * number, 2 + 2 * number])
    scene.log.progressed(list(range(8)), [1] * 8, [1] * 8)
    scene.say()
    assert scene.alarms() == []
