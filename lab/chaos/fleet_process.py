"""Engines without models that publish from one process: real pools, schedulers, publishers and sockets, in real time.

python -m kvscope.lab.chaos.fleet_process FOLDER ENGINES STEPS_PER_S [SCALE]

SCALE multiplies requests, pools and steps in tokens (1). Engine N publishes at ipc://FOLDER/events-N. The process
prints `ready`, then a line of JSON every five seconds with the totals of what was published.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Final

import msgspec

from kvscope.monitor.contract.wire import Batch, Keyframe
from kvscope.monitor.probes.publisher import Publisher

from ..stepped_engine import Lab

REPORT_EVERY_S: Final = 5.0
MAX_LIVE_REQUESTS: Final = 12
FLEET_RING_BYTES: Final = 2 << 20
RUN_BYTES, ID_BYTES = 20, 4


class PublishedTotals(msgspec.Struct):
    """Batches, events, the blocks that those events name, and the bytes of the batches, of all engines."""

    batches: int = 0
    events: int = 0
    block_events: int = 0
    bytes: int = 0
    at_s: float = 0.0


class CountingPublisher(Publisher):
    """A publisher that counts what it sends."""

    totals: PublishedTotals

    def _send(self, frame: Batch | Keyframe) -> None:
        if isinstance(frame, Batch):
            self.totals.batches += 1
            self.totals.events += len(frame.runs) // RUN_BYTES
            self.totals.block_events += len(frame.ids) // ID_BYTES
        super()._send(frame)
        if isinstance(frame, Batch):
            self.totals.bytes += len(self._ring[-1][1])


def engine_name(number: int) -> str:
    """Return the name of engine `number` of the fleet."""
    return f"soak-{number}@127.0.0.1:0/0"


class FleetEngine:
    """One engine of the fleet, with an endless load of its own."""

    def __init__(self, folder: str, number: int, scale: int) -> None:
        name = engine_name(number)
        self._scale = scale
        self.lab = Lab(
            total=400 * scale,
            max_num_batched_tokens=32 * scale,
            connector_share=0.2,
            clock=time,
            pack=False,
            engine=name,
            seed=number,
        )
        events = f"ipc://{folder}/events-{number}"
        self.publisher = CountingPublisher(
            self.lab.log,
            name,
            self.lab.vitals,
            events=events,
            replay=f"{events}-replay",
            ring_bytes=FLEET_RING_BYTES,
        )
        self.publisher.totals = PublishedTotals()
        self._rng = random.Random(number)

    def step(self) -> None:
        """Let a request arrive if few live, and run one step."""
        if len(self.lab.scheduler.requests) < MAX_LIVE_REQUESTS:
            self.lab.arrive(self._scale * self._rng.randint(1, 60), max_tokens=self._rng.randint(1, 30))
        self.lab.step()


def main() -> None:
    """Run until killed."""
    folder, engines, steps_per_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    scale = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    fleet = [FleetEngine(folder, number, scale) for number in range(engines)]
    for engine in fleet:
        engine.publisher.start()
    print("ready", flush=True)
    interval_s = 1 / steps_per_s
    due_s = time.monotonic()
    report_s = due_s + REPORT_EVERY_S
    while True:
        for engine in fleet:
            engine.step()
        due_s = max(due_s + interval_s, time.monotonic() - 1.0)  # a machine that is too busy runs fewer steps
        time.sleep(max(0.0, due_s - time.monotonic()))
        if time.monotonic() >= report_s:
            report_s += REPORT_EVERY_S
            parts = [engine.publisher.totals for engine in fleet]
            total = PublishedTotals(
                sum(part.batches for part in parts),
                sum(part.events for part in parts),
                sum(part.block_events for part in parts),
                sum(part.bytes for part in parts),
                time.monotonic(),
            )
            print(msgspec.json.encode(total).decode(), flush=True)


if __name__ == "__main__":
    main()
