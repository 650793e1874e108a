"""The cost of judging: the share of one core that the detectors take, twice a second of an engine under load.

    python -m benchmarks.detectors [--minutes M …]

The load is made here, so that an hour of it takes minutes: 1,800 requests run and 200 wait, 120 a second end and others
take their place, and blocks come, fill and go at 20,000 events a second. Measurements come after so many minutes of the
stream's own time. In between requests end and come more slowly, while the ledger keeps its past as ever. CPU time of
the thread, so that other work on the machine adds as little as can be.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

from benchmarks.machine import machine
from kvscope.engine.bench.clock import VirtualClock
from kvscope.engine.blocks.block_pool import NULL_BLOCK_COUNT
from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.kinds import Cause, Limit, Release, Status
from kvscope.monitor.contract.wire import Batch, Keyframe, decode, encode
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.findings import Findings
from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.detectors.registry import detectors_for
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.probes.packer import Packer, Vitals

AIM: Final = 0.10
RUNNING, WAITING = 1_800, 200
STEP_S = 0.05
ENDS_A_STEP = 6
BLOCK_SIZE = 16
PREFIXES, PREFIX_BLOCKS, OWN_BLOCKS = 4, 20, 30
LOOKS = 20
STEPS_A_LOOK = 10
ENGINE = "bench@127.0.0.1:0/0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, nargs="+", default=[1, 10, 60], metavar="M")
    minutes = sorted(parser.parse_args().minutes)
    print(machine("msgspec"))
    load, ledger = Load(), EngineLedger(ENGINE)
    took: dict[float, dict[str, float]] = {}
    for until in minutes:
        while load.seconds < until * 60:
            for frame in load.idle():
                ledger.apply(frame)
        took[until] = looked_at(ledger, load)
    assert not ledger.anomalies, ledger.anomalies[0]
    rate = load.block_events / load.busy_s
    print(f"{RUNNING:,} requests running, {WAITING} waiting; {rate:,.0f} block events a second\n")
    print(f"{'µs a judgement, after':24}" + "".join(f"{f'{until:g} min':>10}" for until in minutes))
    for name in took[minutes[0]]:
        print(f"{name:24}" + "".join(f"{took[until][name]:10.0f}" for until in minutes))
    totals = [sum(took[until].values()) for until in minutes]
    print(f"{'all':24}" + "".join(f"{total:10.0f}" for total in totals))
    print(f"{'share of one core':24}" + "".join(f"{total * 2 / 1e6:10.1%}" for total in totals) + f"   aim {AIM:.0%}")


def looked_at(ledger: EngineLedger, load: Load) -> dict[str, float]:
    """µs that each detector takes to judge, and the findings to take it in: medians of LOOKS looks under full load."""
    settings, findings = Settings(), Findings()
    took: dict[str, list[float]] = {}
    for _ in range(LOOKS):
        for _ in range(STEPS_A_LOOK):
            for frame in load.step():
                ledger.apply(frame)
        judgements: list[Judgement] = []
        for detector in detectors_for(ledger):
            began = time.thread_time_ns()
            judgements += detector.detect(ledger, settings)
            took.setdefault(detector.code, []).append((time.thread_time_ns() - began) / 1e3)
        began = time.thread_time_ns()
        findings.update(ledger.engine, ledger.now_ns, judgements)
        took.setdefault("their findings", []).append((time.thread_time_ns() - began) / 1e3)
    return {name: statistics.median(times) for name, times in took.items()}


class Load:
    """An engine's words without the engine."""

    def __init__(self) -> None:
        blocks = NULL_BLOCK_COUNT + PREFIXES * PREFIX_BLOCKS + (RUNNING + 2 * ENDS_A_STEP) * 2 * OWN_BLOCKS
        self.block_events, self.busy_s = 0, 0.0
        self._clock = VirtualClock()
        self._began_ns = self._clock.monotonic_ns()
        self._log = EventLog(self._clock)
        self._packer = Packer(self._log, ENGINE, lambda: Vitals(-1, 0, RUNNING, WAITING, 0, 0, self._step))
        self._free = deque(range(NULL_BLOCK_COUNT, blocks))
        self._prefixes = [[self._free.popleft() for _ in range(PREFIX_BLOCKS)] for _ in range(PREFIXES)]
        self._tables: dict[int, list[int]] = {}
        self._tokens: dict[int, int] = {}
        self._waiting: deque[int] = deque()
        self._numbers = self._hashes = self._step = 0
        self._log.started(blocks, NULL_BLOCK_COUNT, BLOCK_SIZE, "")
        self._begin_with(self._prefixes)
        for _ in range(WAITING):
            self._arrive()

    @property
    def seconds(self) -> float:
        """How long it has gone on."""
        return (self._clock.monotonic_ns() - self._began_ns) / 1e9

    def step(self) -> Iterator[Batch | Keyframe]:
        """Yield all events of a step of the engine."""
        yield from self._pass(STEP_S, ENDS_A_STEP, list(self._tables))
        self.busy_s += STEP_S

    def idle(self) -> Iterator[Batch | Keyframe]:
        """Yield a tenth of a second in which some make progress, and one ends."""
        quiet = list(self._tables)[self._step % 10 :: 10]
        before = self.block_events
        yield from self._pass(0.1, 1 if len(self._tables) >= RUNNING else 2 * ENDS_A_STEP, quiet)
        self.block_events = before

    def _pass(self, seconds: float, turns: int, progress: list[int]) -> Iterator[Batch | Keyframe]:
        log = self._log
        log.tick()
        if len(self._tables) >= RUNNING:
            for number in list(self._tables)[:turns]:
                self._end(number)
                progress = [other for other in progress if other != number]
        for _ in range(turns):
            self._admit()
            self._arrive()
        log.not_scheduled(self._waiting[0], Cause.MAX_NUM_SEQS, self._step + 1)
        log.step_launched(self._step, progress, [1] * len(progress))
        self._clock.sleep(seconds)
        for number in progress:
            self._tokens[number] += 1
            if self._tokens[number] % BLOCK_SIZE == 0 and len(self._tables[number]) < PREFIX_BLOCKS + 2 * OWN_BLOCKS:
                self._allocate(number, [self._free.popleft()])
        outputs = [self._tokens[number] for number in progress]
        log.progressed(progress, [PREFIX_BLOCKS * BLOCK_SIZE + many for many in outputs], outputs)
        log.step_completed(self._step, round(seconds * 1e9), Limit.NONE, -1, -1, -1)
        log.flush(self._step, self._step, (-1, -1, -1, -1))
        self._step += 1
        batches = [*self._packer.pack(), *([self._packer.heartbeat()] if not self._step % 20 else [])]
        yield from filter(None, (decode(encode(batch)) for batch in batches))

    def _begin_with(self, prefixes: list[list[int]]) -> None:
        """One request has been there before, and has left these in the cache."""
        self._arrive()
        number, blocks = self._waiting.popleft(), [block for prefix in prefixes for block in prefix]
        self._tables[number] = []
        self._allocate(number, blocks)
        self._log.released(number, blocks, Release.FINISHED)
        self._log.finished(number, Status.FINISHED_STOPPED)
        del self._tables[number]

    def _arrive(self) -> None:
        self._numbers += 1
        prompt = (PREFIX_BLOCKS + OWN_BLOCKS) * BLOCK_SIZE
        self._log.arrived(self._numbers, f"r-{self._numbers}", prompt, 500, 0, OWN_BLOCKS, 2 * OWN_BLOCKS)
        self._log.queued(self._numbers, Cause.NEW)
        self._waiting.append(self._numbers)

    def _admit(self) -> None:
        number = self._waiting.popleft()
        prefix = self._prefixes[number % PREFIXES]
        self._tables[number], self._tokens[number] = list(prefix), 0
        self._log.looked_up(number, (PREFIX_BLOCKS + OWN_BLOCKS) * BLOCK_SIZE, PREFIX_BLOCKS * BLOCK_SIZE)
        self._log.reused(number, prefix)
        self.block_events += len(prefix)
        self._allocate(number, [self._free.popleft() for _ in range(OWN_BLOCKS)])
        self._log.admitted(number, PREFIX_BLOCKS * BLOCK_SIZE)
        self._log.first_token(number)

    def _allocate(self, number: int, blocks: list[int]) -> None:
        self._tables[number] += blocks
        self._log.allocated(number, blocks)
        hashes = range(self._hashes + 1, self._hashes + 1 + len(blocks))
        self._hashes += len(blocks)
        self._log.cached(number, blocks, hashes)
        self.block_events += 2 * len(blocks)

    def _end(self, number: int) -> None:
        table = self._tables.pop(number)
        del self._tokens[number]
        self._log.released(number, table[::-1], Release.FINISHED)
        self._log.finished(number, Status.FINISHED_STOPPED)
        self._free.extend(table[PREFIX_BLOCKS:])
        self.block_events += len(table)


if __name__ == "__main__":
    main()
