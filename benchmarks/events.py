"""The cost of a block event: for the engine to log it, and for the monitor to read and fold it.

    python -m benchmarks.events [--repeats N]

A block event is one block of one event of the block family: allocated, cached, released and so on. Runs of 1 to 64
blocks show the shared cost of an event's blocks. The serving mix consists of the events of the real scheduler and pool
under a load of chats. Logging is the calls of EventLog. Reading is bytes to frame to EngineLedger. CPU time of one
thread: the fastest of the repeats and their median, since the machine's other work only adds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from benchmarks.machine import machine
from kvscope.engine.bench.clock import VirtualClock
from kvscope.engine.blocks.block_pool import NULL_BLOCK_COUNT
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.event_log import EventLog, count_events
from kvscope.monitor.contract.kinds import Kind, Release
from kvscope.monitor.contract.wire import Batch, decode, encode
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.probes.packer import Packer, Vitals

EMIT_AIM_NS = 60
APPLY_AIM_NS = 500
RUN_LENGTHS = (1, 4, 16, 64)
RUNS_A_STEP = 16
STEPS = 200
MIX_STEPS = 1500
LONG_TABLE = 300_000
"""Blocks of one request: allocated and freed one by one, in an order by chance."""
ENGINE = "bench@127.0.0.1:0/0"

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A method of EventLog and its arguments."""


OF_BLOCKS = ("allocated", "reused", "cached", "evicted", "released")
OF_REQUESTS = ("arrived", "first_token", "finished")
"""Request events that the ledger needs for their blocks to make sense."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    print(machine("msgspec"))
    print(f"\n{'':30}{'':9}{'blocks':>12}{'ns to say':>20}{'ns to read and enter':>22}")
    print(f"{'':30}{'events':>9}{'a run':>12}" + 2 * f"{'fastest':>10}{'median':>10}")
    for length in RUN_LENGTHS:
        row(f"runs of {length}", runs_of(length), repeats)
    row(f"a table of {LONG_TABLE:,}", long_table(), 1)
    serving = serving_mix()
    only_blocks = [[call for call in step if call[0] in (*OF_BLOCKS, *OF_REQUESTS, "flush")] for step in serving]
    row("serving mix, its block events", [serving[0], *only_blocks[1:]], repeats)
    row("serving mix, all that it says", serving, repeats, everything=True)
    print(f"{'aim, for a block event':51}{EMIT_AIM_NS:10}{'':10}{APPLY_AIM_NS:10}")
    print("\nThe last row counts every event, of requests, steps and audits too; it has no aim.")


def row(name: str, steps: list[list[Call]], repeats: int, everything: bool = False) -> None:
    """Measure both sides and print them. The first step, the engine's start, is not measured."""
    payloads = frames(steps)
    batches = [frame for frame in map(decode, payloads[1:]) if isinstance(frame, Batch)]
    runs = [event for batch in batches for event in batch.events()]
    block_runs = [event for event in runs if Kind.ALLOCATED <= event.kind <= Kind.RECLAIMED]
    blocks = sum(len(event.ids) for event in block_runs)
    events = sum(count_events(batch.runs.cast("i").tolist()) for batch in batches) if everything else blocks
    stated = sorted(say(steps) / events for _ in range(repeats))
    entered = sorted(enter(payloads) / events for _ in range(repeats))
    figures = (stated[0], statistics.median(stated), entered[0], statistics.median(entered))
    print(f"{name:30}{events:9}{blocks / len(block_runs):12.1f}" + "".join(f"{figure:10.0f}" for figure in figures))


def say(steps: list[list[Call]]) -> int:
    """Make the calls on a fresh log that is being drained. Return ns of CPU time."""
    log = EventLog()
    # A partial is about as quick to call as the method itself is where its arguments are at hand.
    bound = [[partial(getattr(log, name), *args, **kwargs) for name, args, kwargs in step] for step in steps[1:]]
    took = 0
    for step in bound:
        began = time.thread_time_ns()
        for call in step:
            call()
        took += time.thread_time_ns() - began
        log.flushed.clear()
    return took


def enter(payloads: list[bytes]) -> int:
    """Decode and apply. Return ns of CPU time."""
    ledger = EngineLedger(ENGINE)
    apply_all(ledger, payloads[:1])
    began = time.thread_time_ns()
    apply_all(ledger, payloads[1:])
    took = time.thread_time_ns() - began
    assert not ledger.anomalies, ledger.anomalies[0]
    return took


def apply_all(ledger: EngineLedger, payloads: Iterable[bytes]) -> None:
    for payload in payloads:
        frame = decode(payload)
        assert frame is not None
        ledger.apply(frame)


def frames(steps: list[list[Call]]) -> list[bytes]:
    """Return the frames of these calls, a batch a step."""
    log = EventLog(VirtualClock())
    packer = Packer(log, ENGINE, lambda: Vitals(-1, 0, 0, 0, 0, 0, 0))
    payloads = []
    for step in steps:
        for name, args, kwargs in step:
            getattr(log, name)(*args, **kwargs)
        payloads += [encode(batch) for batch in packer.pack()]
    return payloads


def runs_of(length: int) -> list[list[Call]]:
    """RUNS_A_STEP requests that take blocks, fill them and give them back, each event of `length` blocks."""
    total = NULL_BLOCK_COUNT + RUNS_A_STEP * length
    counts = (-1, -1, -1, -1)
    tables = dict(enumerate(list(range(first, first + length)) for first in range(NULL_BLOCK_COUNT, total, length)))
    start: list[Call] = [("started", (total, NULL_BLOCK_COUNT, 16, ""), {})]
    start += [("arrived", (number, "", 1, 1, 0, length, length), {}) for number in tables]
    steps = [[*start, ("flush", (-1, -1, counts), {})]]
    for step in range(STEPS):
        calls: list[Call] = [("allocated", (number, ids), {}) for number, ids in tables.items()]
        calls += [("cached", (number, ids, ids), {}) for number, ids in tables.items()]
        calls += [("released", (number, ids, Release.PREEMPTED), {}) for number, ids in tables.items()]
        steps.append([*calls, ("flush", (step, step, counts), {})])
    return steps


def long_table() -> list[list[Call]]:
    """One request that takes LONG_TABLE blocks and frees them in a step, an event for each block."""
    ids = list(range(NULL_BLOCK_COUNT, NULL_BLOCK_COUNT + LONG_TABLE))
    counts = (-1, -1, -1, -1)
    total = NULL_BLOCK_COUNT + LONG_TABLE
    start: list[Call] = [("started", (total, NULL_BLOCK_COUNT, 16, ""), {}), ("arrived", (0, "", 1, 1, 0, 1, 1), {})]
    taken: list[Call] = [("allocated", (0, [block]), {}) for block in ids]
    random.Random(5).shuffle(ids)
    freed: list[Call] = [("released", (0, [block], Release.PREEMPTED), {}) for block in ids]
    flush: Call = ("flush", (-1, -1, counts), {})
    return [[*start, flush], [*taken, flush], [*freed, flush]]


def serving_mix() -> list[list[Call]]:
    """Chats over four system prompts, as many as the pool bears: prompts of 150 to 1,500 tokens, answers to 300."""
    lab = Lab(total=2049, block_size=16, max_num_seqs=64, max_num_batched_tokens=2048, seed=3)
    description: tuple[Any, ...] = (lab.pool.total, NULL_BLOCK_COUNT, lab.manager.block_size, "")
    steps: list[list[Call]] = [[("started", description, {}), ("flush", (0, 0, lab.pool.counts()), {})], []]
    record(lab.log, steps)
    rng = random.Random(3)
    systems = [[rng.randrange(1000) for _ in range(rng.randint(100, 500))] for _ in range(4)]
    while len(steps) < MIX_STEPS:
        while len(lab.scheduler.waiting) < 2:
            question = [rng.randrange(1000) for _ in range(rng.randint(50, 1000))]
            lab.arrive(rng.choice(systems) + question, max_tokens=rng.randint(20, 300))
        lab.step()
    return steps[:-1]


def record(log: EventLog, steps: list[list[Call]]) -> None:
    """Keep each call of `log`'s methods from now on, where a flush ends a step."""

    def kept(name: str, method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            # Some lists are the pool's own and change later.
            steps[-1].append((name, tuple(list(arg) if isinstance(arg, list) else arg for arg in args), kwargs))
            method(*args, **kwargs)
            if name == "flush":
                steps.append([])

        return call

    for name in vars(EventLog):
        method = getattr(log, name)
        if not name.startswith("_") and callable(method):
            setattr(log, name, kept(name, method))


if __name__ == "__main__":
    main()
