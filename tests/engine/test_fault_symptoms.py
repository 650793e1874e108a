"""Each fault brings about what a user of the engine would see; with it off, the same load does not."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from kvscope.engine.config import EngineConfig
from kvscope.engine.core.assembly import EventStream
from kvscope.engine.core.engine_core import EngineCore
from kvscope.engine.core.intake import Refused
from kvscope.engine.faults import PLACES
from kvscope.engine.models import load_model
from kvscope.engine.requests.request import Output, SamplingParams
from kvscope.engine.requests.structured_output import StructuredOutputs
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.kinds import Cause, Holder, Kind, Release, Status
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.sources.live_stream import LiveStream
from tests.detectors.scenes import Watched
from tests.engine.process import follow, wait_for
from tests.engine.test_host_connector import store

ELSEWHERE = {"leak.finished-held", "leak.unaccounted"}  # tests/engine/test_faults.py


def on(code: str, fault: bool, keys: str = "") -> list[str]:
    return [f"{code}{keys}"] if fault else []


def usage(lab: Lab) -> float:
    return 1 - lab.pool.num_free / lab.pool.usable


def test_every_fault_has_its_test() -> None:
    tested = {name for name in globals() if name.startswith("test_")}
    for code in PLACES.keys() - ELSEWHERE:
        if code.startswith("sizing."):  # tests/engine/test_memory.py
            continue
        assert f"test_{code.replace('.', '_').replace('-', '_')}" in tested


@pytest.mark.parametrize("fault", [True, False])
def test_leak_idle_not_polled(fault: bool) -> None:
    """Usage stays up while nothing runs, and falls when the next request comes."""
    lab = Lab(connector_share=1.0, faults=on("leak.idle-not-polled", fault))
    held = lab.arrive(40, max_tokens=4)
    lab.run_until_idle()
    polls = lab.connector.polls if lab.connector else 0
    for _ in range(50):
        lab.step()
    assert (usage(lab) > 0) == fault
    assert lab.connector is not None
    assert (lab.connector.polls == polls) == fault
    lab.arrive(4, max_tokens=10)
    lab.run_until_idle()
    assert held.number not in lab.scheduler.deferred


@pytest.mark.parametrize("fault", [True, False])
def test_leak_lease_burst(fault: bool) -> None:
    """Usage climbs as requests finish, and falls all at once when the leases of many end together."""
    lab = Lab(total=201, connector_share=1.0, lease_s=5.0, prefix_caching=False, faults=on("leak.lease-burst", fault))
    for _ in range(8):
        lab.arrive(40, max_tokens=2)
    lab.run_until_idle()
    for _ in range(100):
        lab.step(seconds=0.01)
    assert (usage(lab) > 0.3) == fault
    freed = []
    for _ in range(10):
        before = lab.pool.num_free
        lab.step(seconds=1.0)
        freed.append(lab.pool.num_free - before)
    assert usage(lab) == 0
    assert (max(freed) > 0.3 * lab.pool.usable) == fault
    assert (Release.LEASE_EXPIRED in lab.packer.shadow.totals.released) == fault


@pytest.mark.parametrize("fault", [True, False])
def test_leak_remote_load_lost(fault: bool) -> None:
    """Clients go away while KV is fetched for them, and the usage stays up with nothing running or waiting."""
    lab = fetching(faults=on("leak.remote-load-lost", fault))
    for _ in range(3):
        request = lab.arrive(40)
        while request.number not in lab.scheduler.parked:
            lab.step()
        lab.abort(request)
    for _ in range(50):
        lab.step()
    assert lab.scheduler.num_waiting == len(lab.scheduler.running) == 0
    assert (usage(lab) > 0.2) == fault


@pytest.mark.parametrize("fault", [True, False])
def test_leak_external_pins(fault: bool) -> None:
    """Once each stored block was fetched, nothing more is ever stored: prefixes that come later are always missed."""
    with store(capacity=2, faults=on("leak.external-pins", fault)) as s:
        first, later = ([name * 16 for name in names] for names in ((b"a", b"b"), (b"c", b"d")))
        s.finish(first, [1, 2])
        s.load(first, [11, 12])
        s.finish(later, [3, 4])
        assert s.find(later) == (0 if fault else 2)


@pytest.mark.parametrize("fault", [True, False])
def test_leak_rising_floor(fault: bool) -> None:
    """After each drain to idle, usage is higher than after the last."""
    scene = Watched(faults=on("leak.rising-floor", fault))
    floors = []
    for _ in range(5):
        scene.lab.arrive(20, max_tokens=4)
        scene.run_until_idle()
        floors.append(usage(scene.lab))
    assert (floors == sorted(set(floors)) and floors[0] > 0) == fault
    scene.live(5)
    assert scene.alarms() == (["leak.unaccounted"] if fault else [])


@pytest.mark.parametrize("fault", [True, False])
def test_leak_deferred_free_stalled(fault: bool) -> None:
    """What is freed while a step runs never comes back, though that step is long over."""
    lab = Lab(async_scheduling=True, prefix_caching=False, faults=on("leak.deferred-free-stalled", fault))
    for _ in range(4):
        request = lab.arrive(20, max_tokens=40)
        for _ in range(5):
            lab.step()
        lab.abort(request)
    lab.run_until_idle()
    assert (usage(lab) > 0.2) == fault
    held = lab.packer.shadow.deferrals.values()
    assert bool(held) == fault
    assert all(d.holder == Holder.FENCE and d.fence <= lab.scheduler.completed_step for d in held)


@pytest.mark.parametrize("fault", [True, False])
def test_thrash_cascade(fault: bool) -> None:
    """One request too many, and in the same step all that run are preempted, while nothing becomes free."""
    lab = Lab(
        total=41, max_num_seqs=16, async_scheduling=True, prefix_caching=False, faults=on("thrash.cascade", fault)
    )
    for _ in range(8):
        lab.arrive(15, max_tokens=30)
    most = 0
    while lab.scheduler.has_work or lab.in_flight:
        before = lab.scheduler.num_preemptions
        lab.step()
        most = max(most, lab.scheduler.num_preemptions - before)
    assert lab.scheduler.num_preemptions > 0
    assert (most > 4) == fault
    events = [event for frame in lab.frames for event in frame.events()]
    preempted = [event.kind == Kind.PREEMPTED for event in events if event.kind in (Kind.PREEMPTED, Kind.RECLAIMED)]
    # So many in a row, and not one block came back between the first and the last of them.
    assert (max(len(list(run)) for is_one, run in groupby(preempted) if is_one) > 4) == fault


@pytest.mark.parametrize("fault", [True, False])
def test_corrupt_use_after_free(fault: bool) -> None:
    """A request's block is another's while a step that writes the one's keys and values runs."""
    lab = Lab(total=17, async_scheduling=True, prefix_caching=False, faults=on("corrupt.use-after-free", fault))
    shared = 0
    for _ in range(20):
        gone = lab.arrive(20, max_tokens=40)
        for _ in range(3):
            lab.step()
        writing = set(lab.blocks_of(gone.number)) if lab.in_flight else set()
        lab.abort(gone)
        after = lab.arrive(20, max_tokens=2)
        lab.scheduler.schedule()
        shared += len(writing.intersection(lab.blocks_of(after.number)))
        lab = Lab(total=17, async_scheduling=True, prefix_caching=False, faults=on("corrupt.use-after-free", fault))
    assert (shared > 0) == fault


@pytest.mark.parametrize("fault", [True, False])
def test_stuck_remote_load(fault: bool) -> None:
    """A client waits for its first token for ever; those who came later are served."""
    lab = fetching(faults=on("stuck.remote-load", fault, ":limit=1"))
    stuck, later = lab.arrive(40), lab.arrive(40)
    for _ in range(200):
        lab.step()
    assert later.is_finished
    assert stuck.is_finished != fault
    if fault:
        assert stuck.status == Status.WAITING_FOR_REMOTE_KVS
        assert lab.pool.num_free < lab.pool.usable


@pytest.mark.parametrize("fault", [True, False])
def test_stuck_promotion_starved(fault: bool) -> None:
    """Its KV has come, and steps go on without it."""
    lab = fetching(faults=on("stuck.promotion-starved", fault, ":limit=1"))
    stuck = lab.arrive(40)
    for _ in range(10):
        lab.arrive(40)
        for _ in range(20):
            lab.step()
    assert stuck.is_finished != fault
    if fault:
        assert (stuck.status, stuck.cause) == (Status.WAITING, Cause.NEW)
        events = [event.kind for frame in lab.frames for event in frame.events() if event.request == stuck.number]
        assert events.count(Kind.READY) == 1
        assert not {Kind.QUEUED, Kind.ADMITTED} & set(events[events.index(Kind.READY) :])


@pytest.mark.parametrize("fault", [True, False])
def test_stuck_parked_loads(fault: bool) -> None:
    """Nothing runs; what the head lacks is held by the one behind it, whose KV has come."""
    lab = fetching(total=24, faults=on("stuck.parked-loads", fault))
    requests = [lab.arrive(48, max_tokens=8), lab.arrive(48, max_tokens=8)]
    for _ in range(100):
        lab.step()
    assert all(request.is_finished != fault for request in requests)
    if fault:
        assert lab.scheduler.running == []
        head = lab.scheduler.waiting.head()
        assert head.shortage is not None
        needed, free = head.shortage
        assert free < needed <= free + len(lab.blocks_of(requests[1].number))


@pytest.mark.parametrize("fault", [True, False])
def test_stuck_lost_wakeup(fault: bool) -> None:
    """The KV is there and the engine sleeps: no step, no answer, until another fetch wakes it."""
    config = EngineConfig(block_size=4, num_gpu_blocks_override=100, kv_connector="host")
    faults = on("stuck.lost-wakeup", fault, ":limit=1")
    core = EngineCore(replace(config, faults=tuple(faults)), load_model(config))
    ended: list[int] = []
    core.start(lambda outputs: ended.extend(output.number for output in outputs if output.status is not None))
    params = SamplingParams(temperature=0, max_tokens=2)
    first, other = [list(range(start, start + 40)) for start in (0, 100)]

    def ask(prompt: list[int]) -> int:
        return core.submit("", prompt, params)

    try:
        stored = {ask(first), ask(other)}
        wait_for(lambda: set(ended) == stored and not core.scheduler.deferred)
        assert core.pool.reset_prefix_cache()
        step = core.scheduler.step
        again = ask(first)
        if fault:
            wait_for(lambda: bool(core.faults.on["stuck.lost-wakeup"].triggers))
            time.sleep(0.2)
            assert (core.scheduler.step, again in ended, list(core.scheduler.parked)) == (step, False, [again])
            ask(other)
        wait_for(lambda: again in ended)
    finally:
        core.close()


def fetching(total: int = 65, **settings: Any) -> Lab:
    """A lab in which every request has some of its KV elsewhere."""
    lab = Lab(total=total, load_share=1.0, **settings)
    assert lab.connector is not None
    lab.connector.failing, lab.connector.whole, lab.connector.polls_needed = 0.0, True, 1
    return lab


@pytest.mark.parametrize("fault", [True, False])
def test_stuck_zero_token(fault: bool) -> None:
    """It runs, and gets nothing, at every step, with blocks free; others go on."""
    lab = Lab(faults=on("stuck.zero-token", fault, ":limit=1"))
    stuck, other = lab.arrive(8, max_tokens=10), lab.arrive(8, max_tokens=10)
    for _ in range(60):
        lab.step()
    assert other.is_finished
    assert stuck.is_finished != fault
    if fault:
        assert (stuck.status, stuck.cause, len(stuck.output_token_ids)) == (Status.RUNNING, Cause.ZERO_TOKENS, 1)
        assert stuck.times_passed_over > 50
        assert lab.pool.num_free > 0


@pytest.mark.parametrize("fault", [True, False])
def test_stuck_never_fits(fault: bool) -> None:
    """Nothing runs, the pool is empty, and clients wait for ever behind the one; sound, that one is refused."""
    config = EngineConfig(block_size=4, num_gpu_blocks_override=9, faults=tuple(on("stuck.never-fits", fault)))
    core = EngineCore(config, load_model(config))
    too_large = [1] * (core.pool.usable * config.block_size + 1)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    ended: list[int] = []
    try:
        if fault:
            core.submit("too large", too_large, params)
        else:
            with pytest.raises(Refused, match="the whole pool has 8"):
                core.submit("too large", too_large, params)
        behind = core.submit("behind", [1, 2, 3], params)
        for _ in range(50):
            ended += [output.number for output in core.step() if output.status is not None]
        assert (ended == [behind]) != fault
        assert (core.scheduler.running, core.usage) == ([], 0)
    finally:
        core.close()


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("fault", [True, False])
def test_stuck_self_preempt(fault: bool, prefix_caching: bool) -> None:
    """A client has had its last token long ago, and the engine computes on, the same over and over."""
    lab = Lab(total=9, prefix_caching=prefix_caching, faults=on("stuck.self-preempt", fault))
    request = lab.arrive(12, max_tokens=100)
    behind = lab.arrive(8, max_tokens=2)
    for _ in range(300):
        lab.step()
    holds = lab.pool.usable * lab.manager.block_size
    assert request.num_tokens == holds + 1
    assert request.status == Status.FINISHED_LENGTH_CAPPED or (fault and not request.is_finished)
    assert (request.num_preemptions > 10) == fault
    assert behind.is_finished
    events = [event for frame in lab.frames for event in frame.events() if event.request == request.number]
    peaks = {event.args[2] for event in events if event.kind == Kind.PREEMPTED}
    assert peaks == ({lab.pool.usable} if fault else set())


@pytest.mark.parametrize("fault", [True, False])
def test_stuck_head_of_line(fault: bool) -> None:
    """Requests wait behind one that may become long, with room enough for them, and for all that it has so far."""
    lab = Lab(faults=on("stuck.head-of-line", fault))
    lab.arrive(100, max_tokens=20)
    lab.step()
    long, *others = lab.arrive(20, max_tokens=200), lab.arrive(20, max_tokens=4), lab.arrive(20, max_tokens=4)
    for _ in range(10):
        lab.step()
    assert all(other.is_finished != fault for other in others)
    assert (long in lab.scheduler.waiting) == fault
    if fault:
        assert long.shortage is not None
        assert long.shortage[0] > lab.pool.num_free > sum(lab.manager.blocks_for(r.num_tokens) for r in (long, *others))


@pytest.mark.parametrize("fault", [True, False])
def test_thrash_after_retract(fault: bool) -> None:
    """One preemption, hours ago, and fewer run at once than before, though many wait and the pool is nearly empty."""
    lab = Lab(total=41, prefix_caching=False, faults=on("thrash.after-retract", fault))

    def tokens_a_step() -> float:
        """Of requests of which many fit."""
        requests = [lab.arrive(4, max_tokens=12) for _ in range(40)]
        began = lab.scheduler.step
        lab.run_until_idle()
        return sum(len(request.output_token_ids) for request in requests) / (lab.scheduler.step - began)

    before = tokens_a_step()
    for _ in range(6):
        lab.arrive(16, max_tokens=60)
    lab.run_until_idle()
    assert lab.scheduler.num_preemptions > 0
    after = [tokens_a_step() for _ in range(3)]
    assert all((rate < before / 2) == fault for rate in after)


@pytest.mark.parametrize("fault", [True, False])
def test_thrash_preemption(fault: bool) -> None:
    """Long prompts are let in together and throw each other out: much is computed twice."""
    lab = Lab(total=41, max_num_batched_tokens=16, prefix_caching=False, faults=on("thrash.preemption", fault))
    requests = [lab.arrive(100, max_tokens=4) for _ in range(8)]
    lab.run_until_idle()
    lost = lab.packer.shadow.totals.tokens_lost
    assert lost >= sum(r.num_prompt_tokens for r in requests) / 4 if fault else lost == 0


@pytest.mark.parametrize("fault", [True, False])
def test_collapse_lockstep(fault: bool) -> None:
    """Usage falls from full to nothing at once, with no preemption, and all clients wait for their first token."""
    lab = Lab(total=161, prefix_caching=False, max_num_batched_tokens=64, faults=on("collapse.lockstep", fault))
    usable, clients, sent = lab.pool.usable, 8, 0
    falls = [0.0]
    waited: list[bool] = []
    while sent < 4 * clients:
        for _ in range(clients - len(lab.scheduler.requests)):
            lab.arrive(60, max_tokens=20)
            sent += 1
        running, free = len(lab.scheduler.running), lab.pool.num_free
        if lab.step():
            falls.append((lab.pool.num_free - free) / usable)
            waited.append(running == clients and not lab.scheduler.running)
    assert lab.scheduler.num_preemptions == 0
    assert (max(falls) > 0.8) == fault
    assert any(waited) == fault


@pytest.mark.parametrize("fault", [True, False])
def test_collapse_preempt_all(fault: bool) -> None:
    """Usage falls to nothing within a step, and all that ran waits."""
    lab = Lab(total=41, prefix_caching=False, faults=on("collapse.preempt-all", fault))
    for _ in range(6):
        lab.arrive(16, max_tokens=60)
    emptied = 0
    while lab.scheduler.has_work:
        running = len(lab.scheduler.running)
        finished = lab.step()
        emptied += running >= 4 and not finished and not lab.scheduler.running
    assert (emptied > 0) == fault


@pytest.mark.parametrize("fault", [True, False])
def test_collapse_prefix_hits(fault: bool) -> None:
    """The same prompt again is computed again, though its blocks are stored."""
    lab = Lab(faults=on("collapse.prefix-hits", fault))
    prompt = list(range(40))
    for _ in range(3):
        lab.arrive(prompt, max_tokens=2)
        lab.run_until_idle()
    assert lab.pool.num_cached_idle > 0
    assert (lab.scheduler.prefix_hits == 0) == fault


@pytest.mark.parametrize("fault", [True, False])
def test_collapse_cache_flushed(fault: bool) -> None:
    """A prefix that everybody uses is gone whenever something else ran in between, though the pool is large."""
    lab = Lab(total=121, faults=on("collapse.cache-flushed", fault))
    shared = list(range(40))
    for _ in range(10):
        lab.arrive([*shared, lab.rng.randrange(1000)], max_tokens=2)
        lab.run_until_idle()
        lab.arrive(60, max_tokens=2)
        lab.run_until_idle()
    hits = lab.scheduler.prefix_hits
    assert (hits < 9 * 40 / 2) == fault


@pytest.mark.parametrize("fault", [True, False])
def test_corrupt_double_free(fault: bool) -> None:
    """Two requests get the same block, so one writes over what the other reads."""
    scene = Watched(total=41, faults=on("corrupt.double-free", fault, ":limit=1"))
    lab = scene.lab
    shared = list(range(40))
    shared_out = False
    for _ in range(40):
        lab.arrive([*shared, lab.rng.randrange(1000)], max_tokens=6)
        lab.arrive(24, max_tokens=6)
        for _ in range(4):
            scene.steps(1)
            held = Counter(block for number in lab.manager.tables for block in lab.blocks_of(number))
            shared_out |= any(count > lab.pool.refs[block] for block, count in held.items())
    assert shared_out == fault
    assert ("corrupt.double-free" in scene.alarms()) == fault


@pytest.mark.parametrize("fault", [True, False])
def test_corrupt_counter_drift(fault: bool) -> None:
    """The engine's own figures stop adding up: fewer cached blocks than there are, in the end fewer than none."""
    scene = Watched(faults=on("corrupt.counter-drift", fault))
    lowest = 0
    for _ in range(10):
        scene.lab.arrive(40, max_tokens=2)
        scene.lab.arrive(60, max_tokens=2)
        scene.run_until_idle()
        lowest = min(lowest, scene.lab.pool.counts()[1])
    assert (lowest < 0) == fault
    assert ("corrupt.counter-drift" in scene.alarms()) == fault


class Running:
    """A core in its own thread, and what it put out."""

    def __init__(self, faults: list[str], stream: EventStream | None = None) -> None:
        config = EngineConfig(num_gpu_blocks_override=64, faults=tuple(faults))
        self.core = EngineCore(config, load_model(config), stream, stall_s=0.2)
        self.outputs: list[Output] = []
        self.core.start(self.outputs.extend)

    def ask(self, name: str, grammar: StructuredOutputs | None = None) -> int:
        return self.core.submit(name, [1, 2, 3], SamplingParams(max_tokens=3, structured_outputs=grammar))

    def has_ended(self, number: int) -> bool:
        return any(output.number == number and output.status is not None for output in self.outputs)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.core.close()


def test_stuck_engine_stalled() -> None:
    """No token comes any more, for anybody, and the watchdog says so."""
    with Running(["stuck.engine-stalled:after=2:limit=1"]) as engine:
        hung, late = engine.ask("hangs"), engine.ask("comes late")
        wait_for(lambda: engine.core.watchdog.engine_stalled_s > 0)
        assert hung in engine.core.watchdog.stalled
        assert not engine.has_ended(hung)
        assert not engine.has_ended(late)


def test_stuck_front_end() -> None:
    """One client waits for ever while the engine serves the others."""
    with Running(["stuck.front-end:limit=1"]) as engine:
        lost = engine.ask("lost")
        others = [engine.ask(f"other {n}") for n in range(3)]
        wait_for(lambda: all(engine.has_ended(number) for number in others))
        assert not engine.has_ended(lost)
        assert engine.core.in_flight == 1
        assert not engine.core.scheduler.requests


@pytest.mark.parametrize("fault", [True, False])
def test_stuck_grammar(fault: bool) -> None:
    """One client waits for its grammar, for good, and those behind it are served."""
    anywhere = "tcp://127.0.0.1:*"
    ledger = EngineLedger("tiny@test/0")
    with Running(on("stuck.grammar", fault, ":limit=1"), EventStream(ledger.engine, anywhere, anywhere)) as engine:
        publisher = engine.core.publisher
        assert publisher is not None
        with closing(LiveStream(publisher.events_endpoint, publisher.replay_endpoint)) as live:
            follow(live, [ledger], lambda: ledger.ready)
            waits, other = (engine.ask(name, StructuredOutputs(regex="[ab]{9}")) for name in ("waits", "other"))
            plain = engine.ask("plain")
            wait_for(lambda: engine.has_ended(other) and engine.has_ended(plain))

            def reported() -> bool:
                record = ledger.request("waits")
                return record is not None and (record.stalled_ns if fault else record.finished_ns) > 0

            follow(live, [ledger], reported)
        assert engine.has_ended(waits) != fault
        record = ledger.request("waits")
        assert record is not None
        assert (record.status == Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR) == fault
        assert (record.cause == Cause.GRAMMAR) == fault
