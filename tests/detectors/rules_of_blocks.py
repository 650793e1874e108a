"""Rules about blocks that may say *confirmed*: a scene of each, and for each fact that voids it the same with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import pytest

from kvscope.monitor.contract.kinds import (
    EngineMode,
    Holder,
    Kind,
    Preempt,
    Release,
    Stage,
    Status,
    Tier,
    TierOp,
)
from kvscope.monitor.contract.wire import Run, batch_of
from kvscope.monitor.ledger import invariants
from tests.detectors import leaks, test_corrupt, test_leak_others, test_sizing, waste
from tests.detectors.scenes import (
    ENGINE,
    Observer,
    Spoken,
    Watched,
    finished_held,
    lockstep,
    unaccounted,
)
from tests.detectors.test_collapse import wave_ends
from tests.detectors.test_held_and_blind import log_of, other, stats, with_breakdown
from tests.detectors.test_leak_others import session
from tests.detectors.test_lost_request import Served, kept
from tests.detectors.test_pool_pins import pin
from tests.detectors.test_preempt_all import one_pass

Scene = Callable[[], Observer]


class Rule(NamedTuple):
    """confirmed: the scene. voided: by words of its *Not when*, the same scene with that fact."""

    confirmed: Scene
    voided: Mapping[str, Scene]


def after(scene: Any, act: Callable[[Any], object]) -> Any:
    """The scene, to which something more has happened."""
    act(scene)
    return scene


# -------------------------------------------------------------------- leaks


def tier_pins(*, fetched: bool = True) -> Spoken:
    """A fetch pins the one stored block of a host tier of four, which stays pinned once it has ended."""
    scene = Spoken()
    scene.log.tier(TierOp.PINNED, Tier.HOST, 1, 4, [77])
    scene.log.arrived(1, "r-1", 16, 8, 0, 1, 3)
    scene.log.waiting_on(1, Status.WAITING_FOR_REMOTE_KVS)
    if fetched:
        scene.log.ready(1)
    scene.say()
    scene.wait(12)
    return scene


def pool_pins() -> Spoken:
    scene = Spoken()
    for block in (1, 2):
        pin(scene, block)
    scene.wait(15)
    return scene


def kept_by_connector(*, polled_s: int, polls: bool) -> Served:
    """An idle engine polls for so long, and the lease of 5 s has expired; from then on it polls if `polls`."""
    scene = Served()
    kept(scene, lease_ns=scene.clock.monotonic_ns() + 5_000_000_000)
    scene.beats(polled_s, queued=0)
    scene.beats(30, queued=0, steps=False, polled=polls)
    return scene


def kept_beside_work(*, polled: bool, steps: bool = True) -> Served:
    """The same while request 1 runs."""
    scene = Served()
    scene.arrive(1, [3, 4])
    kept(scene, lease_ns=scene.clock.monotonic_ns() + 5_000_000_000)
    scene.beats(2, queued=1)
    scene.beats(30, queued=1, polled=polled, steps=steps)
    return scene


def drains_with_lost_tables() -> Watched:
    """Each drain to idle leaves all blocks of a request that was aborted."""
    scene = Watched(total=129, faults=["leak.unaccounted"])
    for _ in range(5):
        scene.lab.arrive(20, max_tokens=40)
        scene.steps(4)
        scene.lab.abort(scene.lab.scheduler.running[0])
        scene.run_until_idle()
        scene.live(1)
    scene.live(5, every=0.1)
    return scene


def session_idle(blocks: int = 4, *, seconds: float = 310, mode: EngineMode = EngineMode.UNPAUSED) -> Spoken:
    scene = session(list(range(3, 3 + blocks)))
    if mode != EngineMode.UNPAUSED:
        scene.log.engine_mode(mode)
    scene.wait(seconds)
    return scene


def fenced(*, ends: bool) -> Watched:
    """A request is aborted in a step, behind which its blocks are fenced. Unless it `ends`, it is in flight still."""
    if ends:
        return after(leaks.deferred_free_stalled(), lambda scene: scene.live(5))
    scene = Watched()
    request = scene.lab.arrive(20, max_tokens=40)
    scene.lab.arrive(20, max_tokens=40)
    scene.steps(5)
    scene.launch()
    scene.lab.abort(request)
    scene.lab.flush()
    scene.look()
    scene.beat(60)
    return scene


def fetched_for_the_ended(*, polled: bool = True) -> Served:
    """A request is aborted while KV is fetched for it; the connector reports the end, and the blocks stay."""
    scene = Served()
    scene.arrive(1, [3, 4])
    scene.log.arrived(2, "r-2", 16, 8, 0, 4, 6)
    scene.log.allocated(2, [10, 11, 12, 13])
    scene.log.waiting_on(2, Status.WAITING_FOR_REMOTE_KVS)
    scene.beats(3, queued=2)
    scene.log.completion_delivered(2)
    scene.log.free_deferred(2, [10, 11, 12, 13], Holder.CONNECTOR)
    scene.log.finished(2, Status.FINISHED_ABORTED)
    scene.beats(40, queued=1, polled=polled, steps=polled)
    return scene


LEAKS: Final = {
    "ExternalPins": Rule(
        tier_pins,
        {
            "a fetch that needs its pins goes on": lambda: tier_pins(fetched=False),
            "pinned once or twice": pool_pins,
        },
    ),
    "IdleNotPolled": Rule(
        lambda: kept_by_connector(polled_s=2, polls=False),
        {"overdue while the engine still polled": lambda: kept_by_connector(polled_s=15, polls=False)},
    ),
    "LeaseBurst": Rule(
        lambda: after(leaks.lease_burst(keys=":every=2"), lambda scene: scene.live(8, every=0.5)),
        {"kept few blocks": lambda: after(leaks.lease_burst(keys=":limit=1", total=801), lambda s: s.live(20))},
    ),
    "RisingFloor": Rule(
        lambda: after(leaks.rising_floor(), lambda scene: scene.live(10)),
        {
            "has not risen several times": lambda: after(leaks.rising_floor(drains=2), lambda scene: scene.live(10)),
            "left all of their blocks": drains_with_lost_tables,
        },
    ),
    "SessionPinned": Rule(
        session_idle,
        {"in use": lambda: test_leak_others.session_spoken_in(2), "hold little": lambda: session_idle(1)},
    ),
    "DeferredFreeStalled": Rule(lambda: fenced(ends=True), {"the step has not ended": lambda: fenced(ends=False)}),
    "FinishedHeld": Rule(
        lambda: kept_beside_work(polled=True),
        {
            "an engine with work does not poll either": lambda: kept_beside_work(polled=False, steps=False),
            "an idle one has not polled": lambda: kept_by_connector(polled_s=2, polls=False),
        },
    ),
    "RemoteLoadLost": Rule(
        fetched_for_the_ended,
        {"does not poll its connector": lambda: fetched_for_the_ended(polled=False)},
    ),
    "Unaccounted": Rule(
        lambda: after(unaccounted(), lambda scene: scene.live(3, every=0.1)),
        {
            "announced that it keeps them": lambda: after(finished_held(), lambda scene: scene.live(20)),
            "the floor rises": lambda: after(leaks.rising_floor(), lambda scene: scene.live(10)),
        },
    ),
}


# -------------------------------------------------------------------- wasted work, and caches


def thrown_out(*, outputs: int = 0, reason: Preempt = Preempt.KV_BLOCKS) -> Spoken:
    """Six requests lose their blocks twice, with so many tokens of output since they were admitted."""
    scene = Spoken(total=13)
    blocks = {number: [1 + 2 * number, 2 + 2 * number] for number in range(6)}
    for turn in range(3):
        for number, own in blocks.items():
            if not turn:
                scene.log.arrived(number, f"r-{number}", 12, 8, 0, 3, 5)
            scene.log.allocated(number, own)
            scene.log.admitted(number, 0)
            scene.log.progressed([number], [8], [turn * outputs])
            scene.log.progressed([number], [8], [(turn + 1) * outputs])
        scene.say()
        for number, own in blocks.items():
            scene.log.preempted(number, reason, -1, 2, 8)
            scene.log.released(number, own, Release.PREEMPTED)
        scene.say()
    return scene


def one_pass_for(wanted: int) -> Spoken:
    """Ten that run are preempted for one that lacks so many blocks of the 200 that they had."""
    scene = Spoken(total=202)
    held = {number: list(range(20 * number - 19, 20 * number + 1)) for number in range(1, 11)}
    for number, blocks in held.items():
        scene.arrive(number, blocks)
    scene.log.arrived(11, "r-11", 4 * (1 + wanted), 8, -1, 1, 1 + wanted)
    scene.log.allocated(11, [201])
    scene.log.admitted(11, 0)
    scene.wait(1)
    for number, blocks in held.items():
        scene.log.preempted(number, Preempt.PRIORITY, 11, 20, 80)
        scene.log.released(number, blocks, Release.PREEMPTED)
    scene.wait(1)
    return scene


def cached_little() -> Spoken:
    """A prompt evicts what is cached and needed again; live requests hold most of the pool."""
    scene = Spoken(total=401)
    kept_blocks, own = list(range(1, 101)), list(range(101, 401))
    scene.arrive(1, kept_blocks)
    scene.log.cached(1, kept_blocks, kept_blocks)
    scene.log.released(1, kept_blocks, Release.FINISHED)
    scene.log.finished(1, Status.FINISHED_STOPPED)
    scene.arrive(2, own)
    scene.say()
    scene.log.arrived(3, "r-3", 400, 8, 0, 100, 102)
    scene.log.allocated(3, kept_blocks, kept_blocks)
    scene.log.admitted(3, 0)
    scene.log.released(3, kept_blocks, Release.FINISHED)
    scene.log.finished(3, Status.FINISHED_STOPPED)
    scene.arrive(4, kept_blocks)
    scene.log.cached(4, kept_blocks, kept_blocks)
    scene.wait(1)
    return scene


def prompts_hit_again() -> Watched:
    scene = waste.prefix_hits()
    scene.lab.faults.on["collapse.prefix-hits"].limit = scene.lab.faults.on["collapse.prefix-hits"].triggers
    for _ in range(40):
        scene.lab.arrive([*range(40), scene.lab.rng.randrange(1000)], max_tokens=2)
        scene.run_until_idle()
    scene.live(65)
    return scene


def settled(scene: Any) -> Any:
    return after(scene, lambda one: one.watch.settle())


WASTE: Final = {
    "PreemptionCascade": Rule(
        lambda: settled(waste.cascade()), {"preemptions freed room": lambda: settled(waste.preempt_all())}
    ),
    "PreemptionThrash": Rule(
        thrown_out,
        {
            "the pool is merely full": lambda: thrown_out(outputs=1),
            "a reset of the prefix cache": lambda: thrown_out(reason=Preempt.RESET),
        },
    ),
    "CacheFlushed": Rule(
        lambda: settled(waste.flushed_by_one()),
        {
            "no request asks for the prefixes again": lambda: settled(waste.flushed_by_one(needed_again=False)),
            "live requests need the pool": cached_little,
        },
    ),
    "Lockstep": Rule(
        lambda: wave_ends(together=8, preempted=0),
        {
            "preemptions freed the blocks": lambda: wave_ends(together=7, preempted=1),
            "no wave queues": lambda: after(lockstep(waves=1), lambda scene: scene.live(10)),
        },
    ),
    "PrefixHits": Rule(
        lambda: settled(waste.prefix_hits()),
        {
            "prompts hit again": prompts_hit_again,
            "share no prefix": lambda: settled(waste.prefix_hits(shared=False)),
        },
    ),
    "PreemptAll": Rule(
        lambda: one_pass_for(1),
        {
            "no block became free by it": lambda: one_pass(8, 8, frees=False),
            "the requests finished": lambda: settled(lockstep(waves=2)),
            "one request lacked as many blocks": lambda: one_pass_for(190),
            "a reset of the prefix cache": lambda: one_pass(8, 8, reason=Preempt.RESET),
        },
    ),
}


# -------------------------------------------------------------------- corrupt


def freed(*releases: tuple[int, int], lost: bool = False) -> Spoken:
    """Requests release blocks: 1 has 3 and 4, 2 has 5 and 6."""
    scene = test_corrupt.scene_with_two()
    for number, block in releases:
        scene.log.released(number, [block], Release.FINISHED)
    scene.wait(1)
    return lose(scene) if lost else scene


def lose(scene: Spoken) -> Spoken:
    scene.watch.feed([batch_of(ENGINE, scene.packer.epoch, [Run(Kind.LOST, 0, -1, [9, 9, Stage.TRANSPORT], [])])])
    scene.watch.settle()
    return scene


def freed_twice_by(*, second: bool) -> Spoken:
    """Block 4 is in the free queue twice, or once; request 3 gets it, and then another does."""
    scene = test_corrupt.scene_with_two()
    scene.log.released(1, [4, 3], Release.FINISHED)
    if second:
        scene.log.released(1, [4], Release.FINISHED)
    scene.arrive(3, [4])
    scene.log.released(3, [4], Release.FINISHED)
    scene.wait(1)
    return scene


def handed_out(block: int) -> Spoken:
    scene = test_corrupt.scene_with_two()
    scene.log.allocated(2, [block])
    scene.wait(1)
    return scene


def counts(used: int) -> Spoken:
    scene = test_corrupt.scene_with_two()
    scene.say((32 - used, 0, used, 33))
    return scene


def adds_up_not(*, lost: bool) -> Observer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(invariants.VARIABLE, "0")  # let a ledger go on whose state is impossible
        scene = test_corrupt.scene_that_does_not_add_up()
        scene.packer.next_sequence += lost
        for _ in range(3):
            scene.wait(1)
    return scene


CORRUPT: Final = {
    "DoubleFree": Rule(
        lambda: freed((1, 4), (1, 4)),
        {
            "a later request has no part in it": lambda: freed_twice_by(second=False),
            "events were lost": lambda: freed((1, 4), (1, 4), lost=True),
        },
    ),
    "UseAfterFree": Rule(
        lambda: handed_out(3),
        {"the engine's counts alone disagree": lambda: counts(5), "events were lost": lambda: lose(handed_out(3))},
    ),
    "CounterDrift": Rule(
        lambda: counts(5),
        {
            "a block was freed twice": lambda: freed((1, 4), (1, 4)),
            "handed out while held": lambda: handed_out(3),
            "events were lost": lambda: lose(counts(5)),
        },
    ),
    "Conservation": Rule(
        lambda: adds_up_not(lost=False), {"lost events explain the difference": lambda: adds_up_not(lost=True)}
    ),
}


# -------------------------------------------------------------------- sizes, and what is held by design


def of_log(*replaced: tuple[str, str], more: str = "") -> Observer:
    text = test_sizing.SEED
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    return test_sizing.read(text + more)[0]


def advised(by: int) -> Observer:
    """The real log of an engine, with its advice changed by so many bytes."""
    (figure,) = re.findall(r"--kv-cache-memory=(\d+)` to fit", test_sizing.SEED)
    return of_log((figure, str(int(figure) + by)))


def graphs_line(actual: str, estimated: str) -> str:
    return f"\nCUDA graph pool memory: {actual} GiB (actual), {estimated} GiB (estimated), difference: 1 GiB (100%)."


def inflated(*, running: int = 8, tokens: int = 1, lost: int = 0) -> Spoken:
    """Blocks of 256 tokens, of which so many running requests hold one each; one that has ended left `lost`."""
    scene = Spoken(1 + 8 + lost, block_size=256)
    for number in range(running):
        scene.arrive(number, [1 + number])
    if lost:
        scene.arrive(99, list(range(9, 9 + lost)))
        scene.log.finished(99, Status.FINISHED_ABORTED)
    scene.log.progressed(list(range(running)), [tokens] * running, [1] * running)
    scene.wait(1)
    return scene


def bill(**changed: int) -> Spoken:
    """A device of 1 TiB: what the driver and the engine say of it, in GiB."""
    figures = {
        "device_total": 1024,
        "device_free": 100,
        "used_here": 724,
        "used_by_others": 200,
        "weights": 200,
        "activations_peak": 20,
        "graphs_estimated": 2,
        "graphs_actual": 2,
        "non_torch": 2,
        "kv_pool": 500,
    }
    figures = {name: value << 30 for name, value in {**figures, **changed}.items()}
    return with_breakdown(**figures)


def refused(*lines: str) -> Observer:
    return log_of(*lines)


REFUSED: Final = (
    "ERROR 11-21 10:00:00 [core.py:1] ValueError: To serve at least one request with the models's max seq len (131072),"
    " (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (12.50 GiB). Try increasing"
    " `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
)


def long_request(*, hangs: bool = False) -> Watched:
    scene = Watched(prefix_caching=False)
    scene.lab.arrive(100, max_tokens=150)
    scene.live(10, every=0.2)
    if hangs:
        scene.launch()
        scene.beat(10)
    return scene


SIZES: Final = {
    "BadSuggestionFromLog": Rule(lambda: advised(-(1 << 31)), {"the figures round to it": lambda: advised(-1000)}),
    "BlockInflated": Rule(
        inflated,
        {
            "few requests run": lambda: inflated(running=3),
            "others hold the pool": lambda: inflated(lost=9),
            "their tokens fill half": lambda: inflated(tokens=200),
        },
    ),
    "MemoryElsewhere": Rule(bill, {"the parts explain it": lambda: bill(used_by_others=0, device_free=300)}),
    "KvTooLarge": Rule(
        lambda: bill(device_free=0, graphs_estimated=0, graphs_actual=10),
        {"what is free suffices": lambda: bill(graphs_estimated=0, graphs_actual=10)},
    ),
    "Overreserved": Rule(
        lambda: bill(graphs_estimated=60),
        {"the graphs took half of it": lambda: bill(graphs_estimated=60, graphs_actual=40)},
    ),
    "OverreservedFromLog": Rule(
        lambda: of_log(more=graphs_line("0.65", "9.20")),
        {"the figures round to it": lambda: of_log(more=graphs_line("0.65", "0.66"))},
    ),
    "RefusedStart": Rule(
        lambda: refused(REFUSED),
        {"the engine served requests": lambda: refused(stats("10:00:00", 3), stats("10:00:10", 3), REFUSED)},
    ),
    "KvTooSmall": Rule(
        lambda: test_sizing.preempted_beside(24, 92),
        {
            "the pool holds all that may run": lambda: test_sizing.preempted_beside(24, 92, model_len=12),
            "blocks were free": lambda: test_sizing.preempted_beside(0, 0),
            "held without tokens": lambda: test_sizing.preempted_beside(24, 2),
            "the prefix cache gave": lambda: test_sizing.preempted_beside(24, 92, kept_tokens=7),
        },
    ),
    "LongRequest": Rule(long_request, {"it stands still": lambda: long_request(hangs=True)}),
    "PoolReserved": Rule(bill, {"it is larger than the device": lambda: bill(kv_pool=2000)}),
    "PoolReservedFromLog": Rule(
        of_log, {"it is larger than the device": lambda: of_log(("/178.36 GiB", "/130.36 GiB"))}
    ),
    "LogSilence": Rule(
        lambda: log_of(stats("10:00:00", 3), stats("10:00:10", 2), other("10:01:00")),
        {"that line has no request": lambda: log_of(stats("10:00:00", 3), stats("10:00:10", 0), other("10:01:00"))},
    ),
}
