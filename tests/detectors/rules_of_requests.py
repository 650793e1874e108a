"""Rules about requests that may say *confirmed*: a scene of each, and for each fact that voids it the same with it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kvscope.monitor.contract.kinds import (
    Cause,
    EngineMode,
    Limit,
    Preempt,
    Release,
    Status,
)
from kvscope.monitor.contract.wire import decode, encode
from kvscope.monitor.probes.packer import Vitals
from tests.detectors import stuck
from tests.detectors.rules_of_blocks import Rule, Scene, after, session_idle
from tests.detectors.scenes import (
    Observer,
    Spoken,
    Watched,
    never_fits,
)
from tests.detectors.test_lost_request import Served
from tests.detectors.test_ranks import watched as ranks
from tests.detectors.test_relative import waiting_head
from tests.detectors.test_stuck_requests import fetch_reported
from tests.detectors.test_unclaimed_harm import (
    idle_with_one_waiting,
    larger_step,
    left_out,
    passed_by,
    waits_with_blocks,
)

# -------------------------------------------------------------------- stuck


def no_step(mode: EngineMode) -> Served:
    """Request 1 runs, and no step is launched."""
    scene = Served()
    scene.arrive(1, [3, 4])
    scene.beats(22, queued=1)
    scene.log.engine_mode(mode)
    scene.say()
    scene.beats(30, queued=1, steps=False)
    return scene


def in_temporary_folder(make: Callable[[Path], Observer]) -> Observer:
    with tempfile.TemporaryDirectory() as folder:
        return make(Path(folder))


def missed(*events: Callable[[Any], object], in_step: bool = False) -> Served:
    """The engine reports that request 2 is in no queue; then this happens."""
    scene = Served()
    scene.arrive(1, [3, 4])
    scene.log.arrived(2, "r-2", 8, 8, 0, 2, 4)
    if in_step:
        scene.log.allocated(2, [5, 6])
        scene.log.admitted(2, 0)
        scene.log.step_launched(1, [1, 2], [1, 1])
    scene.say()
    scene.log.not_queued(2, Status.RUNNING if in_step else Status.WAITING)
    for event in events:
        event(scene.log)
    scene.beats(6, queued=1, steps=not in_step)
    return scene


def queue_two(scene: Watched) -> Watched:
    for _ in range(2):
        scene.lab.arrive(8, max_tokens=9_000)
    return scene


def woken(*, passes: bool = False) -> Watched:
    scene, _ = stuck.lost_wakeup()
    (scene.live if passes else scene.beat)(12)
    return scene


def ready_behind(head: Cause | None, *, lacks: bool = False, mode: EngineMode = EngineMode.UNPAUSED) -> Spoken:
    """A request is ready, and one that came later is admitted, or the head of the queue is refused for this cause."""
    scene = Spoken()
    log = scene.log
    scene.arrive(1, list(range(1, 20)))
    for number in (2, 3):
        log.arrived(number, f"r-{number}", 40, 8, 0, 10, 12)
        log.queued(number, Cause.NEW)
    first, ready = (3, 2) if head is None else (2, 3)
    log.waiting_on(ready, Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    scene.say()
    scene.wait(0.5)
    log.ready(ready)
    if head is not None:
        log.allocation_failed(first, 13, 12)
        log.not_scheduled(first, head, 1)
    else:
        if lacks:
            log.not_scheduled(first, Cause.LORA, 1)
        scene.say()
        scene.wait(0.5)
        scene.arrive(4, [30, 31])
    if mode != EngineMode.UNPAUSED:
        log.engine_mode(mode)
    for step in range(60):
        log.tick()
        log.step_launched(step, [1], [1])
        scene.say()
        scene.wait(0.5)
        log.progressed([1], [76 + step], [step])
        log.step_completed(step, 500_000_000, Limit.NONE, -1, -1, -1)
    return scene


def zero_tokens(*, cause: Cause = Cause.ZERO_TOKENS, free: int = 12, mode: EngineMode = EngineMode.UNPAUSED) -> Spoken:
    """Request 1 gets nothing, and its next token begins a block; request 2 goes on."""
    scene = Spoken()
    scene.arrive(1, [1])
    scene.arrive(2, list(range(2, 33 - free)))
    scene.log.progressed([1, 2], [4, 7], [0, 0])
    if mode != EngineMode.UNPAUSED:
        scene.log.engine_mode(mode)
    for step in range(60):
        scene.log.step_launched(step, [2], [1])
        scene.log.progressed([2], [8 + step], [1 + step])
        scene.log.step_completed(step, 1, Limit.NONE, -1, -1, -1)
        scene.log.not_scheduled(1, cause, step + 1)
        scene.wait(0.5)
    return scene


def asks_for(blocks: int) -> Spoken:
    """A request of two blocks is refused, since the engine asks for so many."""
    scene = Spoken(total=9)
    scene.log.arrived(1, "r-1", 8, 8, 0, 2, 4)
    scene.log.allocation_failed(1, blocks, 8)
    scene.log.not_scheduled(1, Cause.KV_BLOCKS, 1)
    scene.wait(3)
    return scene


def parked(
    *,
    fetching: bool = False,
    runs: bool = False,
    freed: int = 0,
    leaked: int = 0,
    mode: EngineMode = EngineMode.UNPAUSED,
) -> Spoken:
    """Of 40 blocks, request 1 has fetched ten, and the head of the queue lacks five. Request 1 gives so many back, or
    one that has ended has `leaked` of them.
    """
    scene = Spoken(total=41, settings=["stuck.remote-load.grace_s=1000"])
    log, blocks = scene.log, list(range(1, 11))
    log.arrived(1, "r-1", 40, 8, 0, 10, 12)
    log.allocated(1, blocks[leaked:])
    log.waiting_on(1, Status.WAITING_FOR_REMOTE_KVS)
    log.arrived(2, "r-2", 140, 8, 0, 35, 37)
    scene.arrive(3, [*blocks[:leaked], 40])
    log.allocation_failed(2, 35, 30 - leaked)
    log.not_scheduled(2, Cause.KV_BLOCKS, 1)
    scene.wait(1)
    if not fetching:
        log.ready(1)
        log.not_scheduled(1, Cause.BEHIND_HEAD, 1)
    if freed:
        log.released(1, blocks[:freed], Release.ROLLED_BACK)
    if not runs:
        log.released(3, [40], Release.FINISHED)
        log.finished(3, Status.FINISHED_STOPPED)
    log.engine_mode(mode)
    return passes_of(scene, 12)


def passes_of(scene: Spoken, seconds: int) -> Spoken:
    """The scheduler makes passes, and that is all."""
    for second in range(seconds):
        scene.packer._vitals = lambda passes=second: Vitals(-1, 0, 0, 3, 0, 0, 10 + passes)  # type: ignore[misc]
        scene.wait(1)
        scene.watch.feed([decode(encode(scene.packer.heartbeat()))])
        scene.watch.settle()
    return scene


def preempts_itself(*, outputs: bool = False, beside: bool = False) -> Spoken:
    """A request that fills a pool of eight blocks preempts itself; it gets tokens in between, or one runs beside it."""
    scene = Spoken(total=9)
    if beside:
        scene.arrive(2, [8])
    scene.log.arrived(1, "r-1", 28, 20, 0, 7, 12)
    for turn in range(5):
        blocks = list(range(1, 8 if beside else 9))
        scene.log.allocated(1, blocks)
        scene.log.admitted(1, 0)
        scene.log.progressed([1], [28], [turn if outputs else 0])
        scene.log.preempted(1, Preempt.KV_BLOCKS, 1, len(blocks), 28)
        scene.log.released(1, blocks, Release.PREEMPTED)
        scene.wait(1)
    return scene


STUCK: Final = {
    "EngineStalled": Rule(
        lambda: no_step(EngineMode.UNPAUSED),
        {
            "the operator paused the engine": lambda: no_step(EngineMode.PAUSED_ALL),
            "its passes find nothing to run": lambda: idle_with_one_waiting(Cause.UNKNOWN),
            "all requests wait for something outside": lambda: after(stuck.lost_wakeup()[0], lambda s: s.beat(30)),
            "other ranks go on": lambda: in_temporary_folder(
                lambda folder: ranks(folder, "m@h:1/0", "m@h:1/1", hang=(1,))
            ),
        },
    ),
    "RankDiverged": Rule(
        lambda: in_temporary_folder(lambda folder: ranks(folder, "m@h:1/0", "m@h:1/1", hang=(1,))),
        {
            "all stop": lambda: in_temporary_folder(lambda folder: ranks(folder, "m@h:1/0", "m@h:1/1", hang=(0, 1))),
        },
    ),
    "LostRequest": Rule(
        missed,
        {
            "a step in flight may still end them": lambda: missed(in_step=True),
            "put them in its queue": lambda: missed(lambda log: log.queued(2, Cause.NEW)),
            "found them in its queue since": lambda: missed(lambda log: log.not_scheduled(2, Cause.NEW, 2)),
        },
    ),
    "LostWakeup": Rule(woken, {"the engine makes passes": lambda: woken(passes=True)}),
    "PromotionStarved": Rule(
        lambda: ready_behind(None),
        {
            "the head of the queue": lambda: ready_behind(Cause.KV_BLOCKS),
            "a limit of the whole pass": lambda: ready_behind(Cause.TOKEN_BUDGET),
            "may lack a slot as others do": lambda: ready_behind(None, lacks=True),
        },
    ),
    "RemoteLoad": Rule(
        lambda: after(fetch_reported(seats=8)[0], lambda scene: scene.live(36)),
        {
            "the engine sleeps": woken,
            "waits for its turn": lambda: after(fetch_reported(seats=1)[0], lambda scene: queue_two(scene).live(36)),
        },
    ),
    "ZeroToken": Rule(
        zero_tokens,
        {
            "the step was full": lambda: zero_tokens(cause=Cause.TOKEN_BUDGET),
            "no block was free": lambda: zero_tokens(free=0),
        },
    ),
    "NeverFits": Rule(
        lambda: after(never_fits()[0], lambda scene: scene.live(5)),
        {
            "preempts itself": lambda: after(stuck.self_preempt()[0], lambda scene: scene.live(20)),
            "others hold the blocks for a while": lambda: waiting_head(0.5, 60),
            "the engine asks for more": lambda: asks_for(1_000),
        },
    ),
    "ParkedLoads": Rule(
        parked,
        {
            "a fetch goes on": lambda: parked(fetching=True),
            "a request runs": lambda: parked(runs=True),
            "others hold what the head lacks": lambda: parked(leaked=8),
            "enough are free": lambda: parked(freed=5),
        },
    ),
    "SelfPreempt": Rule(
        preempts_itself,
        {
            "it progresses in between": lambda: preempts_itself(outputs=True),
            "others take its blocks": lambda: preempts_itself(beside=True),
        },
    ),
    "HeadOfLine": Rule(
        lambda: waiting_head(0.5, 150),
        {
            "the pool never has as many blocks": lambda: after(never_fits()[0], lambda scene: scene.live(150, every=2)),
            "little of it is free": lambda: waiting_head(0.5, 150, held=39),
        },
    ),
}


# -------------------------------------------------------------------- harm


def computed_again(*, preempted: bool = False, drafts: bool = False, mode: EngineMode = EngineMode.UNPAUSED) -> Served:
    """Request 2 has 80 of its 100 tokens computed, is sent back to 8, and comes no further."""
    scene = Served()
    scene.arrive(1, [1])
    scene.log.arrived(2, "r-2", 6 if drafts else 100, 8, 0, 25, 27)
    scene.log.allocated(2, list(range(2, 27)))
    scene.log.admitted(2, 0)
    scene.log.progressed([2], [8 if drafts else 80], [1 if drafts else 0])
    scene.beats(22, queued=2)
    scene.log.engine_mode(mode)
    if preempted:
        scene.log.preempted(2, Preempt.KV_BLOCKS, 1, 25, 80)
        scene.log.released(2, list(range(2, 27)), Release.PREEMPTED)
        scene.log.allocated(2, list(range(2, 27)))
        scene.log.admitted(2, 0)
    for turn in range(20):
        scene.log.progressed([2], [7 if drafts else 8 + turn % (80 if preempted else 4)], [1 if drafts else 0])
        scene.beats(1, queued=2)
    return scene


def of_none(act: Callable[[Served], object] = lambda scene: None, *, seconds: int = 30) -> Served:
    """Steps leave request 2 out."""
    scene = Served()
    left_out(scene)
    act(scene)
    scene.beats(seconds, queued=2)
    return scene


def passed_by_more_urgent() -> Served:
    scene = Served()
    scene.arrive(1, [1])
    scene.log.arrived(2, "r-2", 8, 8, 0, 2, 4)
    scene.beats(1, queued=2)
    scene.log.arrived(3, "r-3", 4, 8, -1, 1, 3)
    scene.log.allocated(3, [4])
    scene.log.admitted(3, 0)
    scene.beats(45, queued=3)
    return scene


def zero_cause(scene: Served) -> None:
    for turn in range(20):
        scene.log.not_scheduled(2, Cause.ZERO_TOKENS, 1 << turn)
        scene.beats(1, queued=2)


def outside() -> Served:
    scene = Served()
    scene.arrive(1, [1])
    scene.log.released(1, [1], Release.FINISHED)
    scene.log.finished(1, Status.FINISHED_STOPPED)
    scene.log.arrived(2, "r-2", 8, 8, 0, 2, 4)
    scene.log.waiting_on(2, Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    scene.say()
    for _ in range(20):
        scene.passes += 10
        scene.beats(1, queued=1, steps=False)
    return scene


def lacks_adapter() -> Served:
    scene = Served()
    scene.arrive(1, [1])
    scene.log.arrived(2, "r-2", 8, 8, 0, 2, 4)
    scene.log.not_scheduled(2, Cause.LORA, 1)
    scene.beats(1, queued=2)
    scene.arrive(3, [4])
    scene.beats(45, queued=3)
    return scene


HARM: Final = {
    "ComputedAgain": Rule(
        computed_again,
        {
            "it was preempted": lambda: computed_again(preempted=True),
            "draft tokens were rejected": lambda: computed_again(drafts=True),
        },
    ),
    "NoProgress": Rule(
        of_none,
        {
            "another finding names the request": lambda: of_none(zero_cause, seconds=1),
            "the step in flight computes far more": larger_step,
        },
    ),
    "Unserved": Rule(
        lambda: idle_with_one_waiting(Cause.UNKNOWN),
        {
            "makes no pass": lambda: after(
                idle_with_one_waiting(Cause.UNKNOWN, 0), lambda scene: scene.beats(40, queued=1, steps=False)
            ),
            "they wait for something outside it": outside,
        },
    ),
    "Overtaken": Rule(
        lambda: passed_by(45),
        {
            "all are more urgent": passed_by_more_urgent,
            "it lacks something of its own": lacks_adapter,
            "another finding names it": lambda: after(never_fits()[0], lambda scene: scene.live(60)),
        },
    ),
    "HeldBlocks": Rule(
        lambda: waits_with_blocks(9),
        {"another finding names them": lambda: of_none(seconds=70)},
    ),
}


def pause(scene: Any) -> Any:
    """The operator pauses the engine before it has lasted."""
    log = scene.lab.log if isinstance(scene, Watched) else scene.log
    log.engine_mode(EngineMode.PAUSED_ALL)
    if isinstance(scene, Watched):
        scene.lab.flush()
        scene.look()
    else:
        scene.say()
    return scene


def waits_in_a_pause(served: Served, seconds: int = 40) -> Served:
    for _ in range(seconds):
        served.passes += 10
        served.beats(1, queued=2, steps=False)
    return served


PAUSED: Final[Mapping[str, Scene]] = {
    "SessionPinned": lambda: session_idle(mode=EngineMode.PAUSED_ALL),
    "LostWakeup": lambda: after(pause(stuck.lost_wakeup()[0]), lambda scene: scene.beat(12)),
    "PromotionStarved": lambda: ready_behind(None, mode=EngineMode.PAUSED_NEW),
    "RemoteLoad": lambda: after(pause(fetch_reported(seats=8)[0]), lambda scene: scene.live(36)),
    "ZeroToken": lambda: zero_tokens(mode=EngineMode.PAUSED_ALL),
    "ParkedLoads": lambda: parked(mode=EngineMode.PAUSED_ALL),
    "HeadOfLine": lambda: waiting_head(0.5, 150, mode=EngineMode.PAUSED_NEW),
    "ComputedAgain": lambda: computed_again(mode=EngineMode.PAUSED_ALL),
    "NoProgress": lambda: waits_in_a_pause(pause(of_none(seconds=0))),
    "Unserved": lambda: waits_in_a_pause(pause(idle_with_one_waiting(Cause.UNKNOWN, 0))),
    "Overtaken": lambda: waits_in_a_pause(pause(passed_by(5))),
    "HeldBlocks": lambda: waits_in_a_pause(pause(waits_with_blocks(9, 5)), 75),
}
