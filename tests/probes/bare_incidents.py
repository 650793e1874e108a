"""Incidents on vLLM's bare Scheduler in virtual time: run by a Python that has vLLM.

    PYTHONPATH=. PYTHON -m tests.probes.bare_incidents MODEL_DIRECTORY OUT [INCIDENT …]

Each incident is a function. The frames that the probe sends meanwhile are written to OUT/INCIDENT, each after its
length, of four bytes. Virtual time makes minutes of an engine's life a second of the test's, and every run the same.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

from kvscope.engine.bench.clock import VirtualClock
from tests.probes.bare_queue_incidents import QUEUE_INCIDENTS
from tests.probes.bare_unusual_loads import FAULTS_BESIDE_LOADS, UNUSUAL_LOADS
from tests.probes.connector_settings import CONNECTOR
from tests.probes.incident_scene import STEP_S, Open, Scene


def leak(scene: Scene, requests: int = 6) -> None:
    """A connector never reports the blocks of these as sent: 13 of each."""
    for number in range(requests):
        scene.ask(f"keep-{number}", 400, 2)
    scene.run(2)


def leak_and_big(begin: Open) -> None:
    """78 of 139 blocks are kept for good; `big` needs 100, and `small` stands behind it."""
    scene = begin(kv_transfer_config=CONNECTOR, blocks=140)
    leak(scene)
    scene.ask("big", 3190, 4)
    scene.ask("small", 40, 4)
    scene.run(45)


def leak_and_room(begin: Open) -> None:
    """The same blocks are kept; what comes fits beside them, and is served when those before it end."""
    scene = begin(kv_transfer_config=CONNECTOR, blocks=140)
    leak(scene)
    scene.ask("long", 1200, 300)
    scene.ask("fits", 600, 300)
    scene.run(45, scene.chat)


def leak_of_all(begin: Open) -> None:
    """All but three blocks are kept, nothing runs, and six requests of ten blocks wait."""
    scene = begin(kv_transfer_config=CONNECTOR, blocks=82)
    leak(scene)
    for number in range(6):
        scene.ask(f"starved-{number}", 300, 4)
    scene.run(45)


def leak_while_idle(begin: Open) -> None:
    """No request comes after those whose blocks are kept."""
    scene = begin(kv_transfer_config=CONNECTOR, blocks=140)
    leak(scene)
    scene.run(60)


def skip_free(scene: Scene, requests: int, prompt_tokens: int = 400) -> None:
    """Requests end, and no block of theirs is freed."""
    manager = scene.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    asked = [scene.ask(f"forgotten-{number}", prompt_tokens, 20).request_id for number in range(requests)]
    scene.run(0.2)
    for name in asked:
        manager.req_to_blocks.pop(name)
        manager.num_cached_block.pop(name, None)
    from vllm.v1.request import RequestStatus

    scene.scheduler.finish_requests(asked, RequestStatus.FINISHED_ABORTED)
    scene.run(2)


def lost_blocks_and_big(begin: Open) -> None:
    """A defect of the engine skips the frees of six requests; then `big` comes, and `small` behind it."""
    scene = begin(blocks=140)
    skip_free(scene, 6)
    scene.ask("big", 3190, 4)
    scene.ask("small", 40, 4)
    scene.run(45)


def lost_blocks_of_a_large_pool_while_idle(begin: Open) -> None:
    """The same, in a pool of which the passes until the engine is idle audit a small part."""
    scene = begin(blocks=9_000)
    skip_free(scene, 6)
    scene.run(8)


def lost_blocks_of_a_large_pool_in_slow_steps(begin: Open) -> None:
    """The same, while another request runs on, a token in five seconds."""
    scene = begin(blocks=9_000)
    scene.ask("slow", 40, 100)
    skip_free(scene, 6)
    scene.run(40, step_s=5.0)


def idle_now_and_then(begin: Open) -> None:
    """Requests come every few seconds, and once while the tables of the idle engine are kept."""
    scene = begin(blocks=140)
    for seconds in (4, 1.5, 0.5, 6):
        scene.ask(f"after-{seconds}", 400, 20)
        scene.run(0.5)
        scene.run(seconds)


def big_without_leak(begin: Open) -> None:
    """`big` waits for requests that run to end, and then runs."""
    scene = begin(blocks=140)
    for number in range(3):
        scene.ask(f"runs-{number}", 600, 1000)
    scene.run(1)
    scene.ask("big", 3190, 4)
    scene.ask("small", 40, 4)
    scene.run(30)


def paused(begin: Open) -> None:
    """Requests run, others wait, and the operator pauses the engine; then only new requests; then it goes on."""
    scene = begin(blocks=140)
    states = type(scene.scheduler._pause_state)
    for number in range(3):
        scene.ask(f"kept-{number}", 40, 1500)
    scene.run(2)
    scene.scheduler.set_pause_state(states.PAUSED_ALL)
    scene.idle(20)
    scene.scheduler.set_pause_state(states.PAUSED_NEW)
    scene.ask("new", 40, 4)
    scene.run(45)
    scene.scheduler.set_pause_state(states.UNPAUSED)
    scene.run(5)


def paused_new_and_idle(begin: Open) -> None:
    """Only new requests are held back, and there are no others."""
    scene = begin(blocks=140)
    scene.run(1, scene.chat)
    scene.run(5)
    scene.scheduler.set_pause_state(type(scene.scheduler._pause_state).PAUSED_NEW)
    scene.ask("new-0", 30, 4)
    scene.ask("new-1", 30, 4)
    scene.run(40)


def hang_after_pause(begin: Open) -> None:
    """A pause has ended, and a step does not return."""
    scene = begin(blocks=140)
    states = type(scene.scheduler._pause_state)
    scene.ask("runs", 40, 1500)
    scene.run(3)
    scene.scheduler.set_pause_state(states.PAUSED_ALL)
    scene.idle(8)
    scene.scheduler.set_pause_state(states.UNPAUSED)
    scene.run(3)
    scene.hang(20)


def lost_from_queue(begin: Open) -> None:
    """A plug-in removes a request from the queue of those that run, and one from those that wait, under load."""
    scene = begin(blocks=300, max_num_seqs=4)
    lost = [scene.ask("lost-running", 100, 1500)]
    scene.run(1, scene.chat)
    for number in range(2):
        scene.ask(f"runs-{number}", 100, 1500)
    lost.append(scene.ask("lost-waiting", 100, 1500))
    scene.turn()
    scene.scheduler.running = [one for one in scene.scheduler.running if one not in lost]
    scene.scheduler.waiting.remove_requests(lost)
    scene.run(20, scene.chat)


def one_slow_heartbeat(begin: Open) -> None:
    """`big` waits for blocks that a leak holds; the engine makes no pass for two seconds, in which it beats."""
    scene = begin(kv_transfer_config=CONNECTOR, blocks=140)
    leak(scene)
    scene.ask("big", 3190, 4)
    scene.run(15)
    scene.idle(2.25)
    scene.run(15)


def no_pass_at_all(begin: Open) -> None:
    """The same, and the engine never makes another pass."""
    scene = begin(kv_transfer_config=CONNECTOR, blocks=140)
    leak(scene)
    scene.ask("big", 3190, 4)
    scene.run(15)
    scene.idle(20)


def crowd(scene: Scene) -> None:
    """Long answers, four at a time."""
    if sum(request.request_id.startswith("long") for request in scene.scheduler.requests.values()) < 4:
        scene.ask(f"long-{scene.came}", 100, 400)


def leak_then_restart(begin: Open) -> None:
    """What a leak leaves of the pool makes requests preempt one another; a restarted engine has the same load."""
    scene = begin(blocks=200)
    skip_free(scene, 12)
    scene.run(40, lambda: crowd(scene))
    scene.clock.sleep(5)
    again = begin(blocks=200, clock=scene.clock)
    again.run(60, lambda: crowd(again))


def leak_that_ends(begin: Open) -> None:
    """A connector keeps most of the pool for 40 s and then gives it back; meanwhile requests preempt one another."""
    scene = begin(kv_transfer_config=CONNECTOR, blocks=200)
    leak(scene, 12)
    scene.run(40, lambda: crowd(scene))
    scene.bare.sending += [(0, name) for name in scene.scheduler.requests if "keep" in name]
    scene.run(200, scene.chat)


def pool_too_small(begin: Open) -> None:
    """Nothing leaks; four long answers do not fit at once."""
    scene = begin(blocks=50)
    scene.run(60, lambda: crowd(scene))


def too_small_then_restart(begin: Open) -> None:
    """Nothing leaks, and preemptions cost much; the restarted engine has a light load."""
    scene = begin(blocks=50)
    scene.run(40, lambda: crowd(scene))
    again = begin(blocks=50, clock=scene.clock)
    again.run(60, again.chat)


def free_twice(begin: Open) -> None:
    """Code of the scheduler frees blocks that a running request still has."""
    scene = begin(blocks=140)
    scene.ask("victim", 200, 1500)
    scene.run(2)
    manager = scene.scheduler.kv_cache_manager
    (blocks,) = manager.coordinator.single_type_managers[0].req_to_blocks.values()
    manager.block_pool.free_blocks(blocks[:2])
    scene.write()
    scene.idle(3)


def slow_early_step(begin: Open) -> None:
    """The eleventh step of the engine's epoch takes 22 s; all later ones are quick."""
    scene = begin(blocks=140)
    scene.ask("first", 40, 500)
    scene.run(0.2)
    scene.hang(22)
    scene.run(20, scene.chat)


def late_hang(begin: Open) -> None:
    """Hundreds of steps were quick, and one takes 22 s."""
    scene = begin(blocks=140)
    scene.ask("first", 40, 1500)
    scene.run(15)
    scene.hang(22)
    scene.run(5)


def renewed_lease(begin: Open) -> None:
    """A consumer renews its leases of 30 s while its queue is long, and takes the blocks after 70 s."""
    scene = begin(kv_transfer_config=CONNECTOR, blocks=140)
    leak(scene)
    scene.run(70)
    scene.bare.sending += [(0, name) for name in scene.scheduler.requests if "keep" in name]
    scene.run(10)


def nixl_lease(begin: Open) -> None:
    """A NIXL consumer takes the blocks after 25 s, within the lease of 30 s that it has."""
    scene = begin(kv_transfer_config={**CONNECTOR, "kv_connector": "NixlKeepingConnector"}, blocks=140)
    leak(scene)
    scene.run(23)
    scene.bare.sending += [(0, name) for name in scene.scheduler.requests if "keep" in name]
    scene.run(10)


def nixl_consumer_gone(begin: Open) -> None:
    """The same, of a consumer that never takes them, and a lease that nothing ends."""
    scene = begin(kv_transfer_config={**CONNECTOR, "kv_connector": "NixlKeepingConnector"}, blocks=140)
    leak(scene)
    scene.run(60)


def windows_fit(begin: Open) -> None:
    """A prompt that fits only because windows recycle blocks waits behind max_num_seqs for 20 s."""
    scene = begin(blocks=200, groups=(("full",), ("sliding", 64), ("sliding", 100)), max_num_seqs=2)
    for number in range(2):
        scene.ask(f"runs-{number}", 100, 1000)
    scene.run(1)
    scene.ask("long-doc", 3900, 4)
    scene.run(60)


def windows_never_fit(begin: Open) -> None:
    """The same prompt and a pool that has too few blocks for its full attention."""
    scene = begin(blocks=140, groups=(("full",), ("sliding", 64), ("sliding", 100)), max_num_seqs=2)
    scene.ask("long-doc", 4000, 4)
    scene.run(20)


def unpinned_blocks(begin: Open) -> None:
    """A connector pins blocks and unpins them every second; frees of six requests were skipped."""
    scene = begin(blocks=140)
    pool = scene.scheduler.kv_cache_manager.block_pool
    scene.run(2, scene.chat)
    skip_free(scene, 6)
    for _ in range(15):
        scene.run(1, scene.chat)
        (table, *_) = [t for t in pool_tables(scene) if t]
        pinned = [block for block in table if not block.is_null][:2]
        pool.touch(pinned)
        scene.run(0.2)
        pool.unpin_blocks(pinned, lambda _block: None) if hasattr(pool, "unpin_blocks") else pool.free_blocks(pinned)


def pool_tables(scene: Scene) -> list[Any]:
    """The block tables of the requests that have one."""
    return list(scene.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks.values())


def one_rank_stands(begin: Open) -> None:
    """Two data-parallel ranks of one server; rank 1 hangs, and rank 0 goes on."""
    clock = VirtualClock()
    ranks = [begin(blocks=140, rank=rank, clock=clock) for rank in (0, 1)]
    for scene in ranks:
        scene.ask("runs", 40, 3000)
    for _ in range(150):
        ranks[0].turn(STEP_S / 2)
        ranks[1].turn(STEP_S / 2)
    ranks[1].bare.schedule()
    for _ in range(1000):
        ranks[0].turn()
        ranks[1].write()


def ranks_under_one_name(begin: Open) -> None:
    """The same two ranks, healthy, where KVSCOPE_ENGINE_ID names the server."""
    os.environ["KVSCOPE_ENGINE_ID"] = "prod"
    try:
        clock = VirtualClock()
        ranks = [begin(blocks=140, rank=rank, clock=clock) for rank in (0, 1)]
        for rank, scene in enumerate(ranks):
            scene.ask(f"of-rank-{rank}", 40, 400)
        for _ in range(150):
            for scene in ranks:
                scene.turn(STEP_S / 2)
    finally:
        del os.environ["KVSCOPE_ENGINE_ID"]


def by_priority(begin: Open) -> None:
    """A healthy load by priority, in small steps: short unlike requests come and end all the time."""
    scene = begin(blocks=100, max_num_seqs=7, scheduling_policy="priority", batched_tokens=96)
    rng = scene.bare.rng

    def load() -> None:
        while len(scene.scheduler.requests) < 14:
            scene.ask(f"r-{scene.came}", rng.randrange(200, 1500), rng.randrange(2, 30), rng.randrange(3))

    scene.run(120, load)


def waves(begin: Open) -> None:
    """Eight alike requests at a time take nine tenths of the pool; the next eight come when all have ended."""
    scene = begin(blocks=200, max_num_seqs=8)

    def load() -> None:
        if not scene.scheduler.requests:
            for _ in range(8):
                scene.ask(f"alike-{scene.came}", 600, 120)

    scene.run(60, load, step_s=0.1)


INCIDENTS: Final = {
    each.__name__: each
    for each in (
        leak_and_big,
        leak_and_room,
        leak_of_all,
        leak_while_idle,
        lost_blocks_and_big,
        lost_blocks_of_a_large_pool_while_idle,
        lost_blocks_of_a_large_pool_in_slow_steps,
        idle_now_and_then,
        big_without_leak,
        paused,
        paused_new_and_idle,
        hang_after_pause,
        lost_from_queue,
        one_slow_heartbeat,
        no_pass_at_all,
        leak_then_restart,
        leak_that_ends,
        pool_too_small,
        too_small_then_restart,
        free_twice,
        slow_early_step,
        late_hang,
        renewed_lease,
        nixl_lease,
        nixl_consumer_gone,
        windows_fit,
        windows_never_fit,
        unpinned_blocks,
        one_rank_stands,
        ranks_under_one_name,
        by_priority,
        waves,
        *QUEUE_INCIDENTS,
    )
}


BESIDE_THESE: Final = {each.__name__: each for each in (*UNUSUAL_LOADS, *FAULTS_BESIDE_LOADS)}
"""Those that only a test of their own runs."""


def main() -> None:
    model, out, *names = sys.argv[1:]
    for name in names or INCIDENTS:
        with (Path(out) / name).open("wb") as file:
            (INCIDENTS | BESIDE_THESE)[name](lambda file=file, **settings: Scene(model, file, **settings))


if __name__ == "__main__":
    main()
