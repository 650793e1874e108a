"""A lab in which everything happens that a dashboard shows, over and over, until it is killed.

python -m tests.dashboards.incident_process EVENTS

Blocks of finished requests are never given back, blocks of aborted ones stay in use, a request that can never fit
waits behind the others, running requests are preempted, prompts share prefixes; and the stream loses batches, since
more is logged in one go than its buffer holds, with a pause after it in which no audit puts that right.
"""

from __future__ import annotations

import random
import sys
import time

from kvscope.engine.requests.request import Request
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.probes.publisher import Publisher, replay_endpoint_for

TOTAL = 101
BLOCK_SIZE = 4
BUFFER = 32
SHARED = list(range(8))
BILL = [80 << 30, 8 << 30, 70 << 30, 1 << 30, 14 << 30, 2 << 30, 1 << 30, 1 << 30, 1 << 30, 54 << 30, -1, -1, -1, -1]
FAULTS = ("leak.finished-held:limit=3", "leak.unaccounted:limit=2")


def main() -> None:
    events = sys.argv[1]
    lab = Lab(
        total=TOTAL,
        block_size=BLOCK_SIZE,
        connector_share=1.0,
        faults=FAULTS,
        capacity=BUFFER,
        policy="priority",
        clock=time,
        pack=False,
    )
    publisher = Publisher(
        lab.log, "lab@127.0.0.1:0/0", lab.vitals, events=events, replay=replay_endpoint_for(events), heartbeat_s=0.2
    )
    publisher.start()
    print("ready", flush=True)
    lab.log.memory(BILL)
    rng = random.Random(0)
    lab.arrive(TOTAL * BLOCK_SIZE, priority=1, name="never-fits")
    while True:
        for _ in range(100):
            _step(lab, rng)
            time.sleep(0.01)
        dropped = lab.log.dropped_batches
        while lab.log.dropped_batches == dropped:
            _step(lab, rng)
        time.sleep(1.5)


def _step(lab: Lab, rng: random.Random) -> None:
    if len(lab.scheduler.requests) < 16:
        question = [rng.randrange(1000) for _ in range(rng.randint(4, 16))]
        lab.arrive(SHARED + question, max_tokens=rng.randint(8, 30))
    running: list[Request] = list(lab.scheduler.running)
    if running and rng.random() < 0.02:
        lab.abort(running[0])
    lab.step()


if __name__ == "__main__":
    main()
