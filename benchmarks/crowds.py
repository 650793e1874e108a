"""The cost of one judgement where very many requests live, or very many are to blame.

    python -m benchmarks.crowds

10,000 live requests with 4,000 preemptions in memory, of which a judgement should take 50 ms at most, and 1,000
culprits against 1, which should cost the same. CPU time of the thread, medians.
"""

from __future__ import annotations

import statistics
import time
from typing import Final

from benchmarks.machine import machine
from kvscope.engine.bench.clock import VirtualClock
from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.kinds import Preempt, Status
from kvscope.monitor.contract.wire import decode, encode
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.findings import Findings
from kvscope.monitor.detectors.registry import judge_engine
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.probes.packer import Packer, Vitals

CROWD: Final = "bench@127.0.0.1:1/0"
LIVING, PREEMPTED, RUN = 10_000, 4_000, 2_000
CULPRITS: Final = 1_000
MEASURED_TIMES: Final = 11


class Crowd:
    """The words of an engine with many requests, folded into a ledger."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.log = EventLog(self.clock)
        self.packer = Packer(self.log, CROWD, lambda: Vitals(-1, 0, RUN, LIVING - RUN, 0, 0, 0))
        self.ledger = EngineLedger(CROWD)
        self.log.started(4 * LIVING, 1, 16, "")

    def fold(self, seconds: float) -> None:
        """Send what was logged, and let time pass."""
        self.clock.sleep(seconds)
        self.log.tick()
        self.log.flush(-1, -1, (-1, -1, -1, -1))
        for batch in self.packer.pack():
            frame = decode(encode(batch))
            assert frame is not None
            self.ledger.apply(frame)

    def judged_ms(self) -> float:
        """Return how long one judgement and its findings take."""
        took, findings, settings = [], Findings(), Settings()
        for _ in range(MEASURED_TIMES):
            self.fold(0.5)
            began = time.thread_time_ns()
            findings.update(CROWD, self.ledger.now_ns, judge_engine(self.ledger, settings))
            took.append((time.thread_time_ns() - began) / 1e6)
        return statistics.median(took)


def crowded_ms() -> float:
    """Measure 10,000 live requests, of which 4,000 were preempted."""
    crowd = Crowd()
    for number in range(LIVING):
        crowd.log.arrived(number, f"r-{number}", 40, 100, 0, 3, 9)
        if number < RUN + PREEMPTED:
            crowd.log.allocated(number, [1 + 3 * number + one for one in range(3)])
            crowd.log.admitted(number, 0)
    crowd.fold(1)
    for number in range(RUN, RUN + PREEMPTED):
        crowd.log.preempted(number, Preempt.KV_BLOCKS, 0, 0, 40)
    crowd.fold(1)
    return crowd.judged_ms()


def culprits_ms(count: int) -> float:
    """Measure this many requests that ended and left their blocks."""
    crowd = Crowd()
    for number in range(CULPRITS):
        crowd.log.arrived(number, f"r-{number}", 40, 100, 0, 3, 9)
        crowd.log.allocated(number, [1 + 3 * number + one for one in range(3)])
        crowd.log.admitted(number, 0)
        if number < count:
            crowd.log.finished(number, Status.FINISHED_ABORTED)
    crowd.fold(5)
    return crowd.judged_ms()


def main() -> None:
    """Print both."""
    print(machine("msgspec"))
    print(f"{LIVING:,} live requests, {PREEMPTED:,} preemptions: {crowded_ms():.1f} ms a judgement (aim 50)")
    one, many = culprits_ms(1), culprits_ms(CULPRITS)
    print(f"1 culprit: {one:.1f} ms, {CULPRITS:,} culprits: {many:.1f} ms a judgement")


if __name__ == "__main__":
    main()
