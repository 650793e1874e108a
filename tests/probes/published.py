"""A lab whose events are published on sockets of its own, and work for it to do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.probes.publisher import Publisher

ENGINE = "lab@127.0.0.1:0/0"


@contextmanager
def published(lab: Lab, path: Path, **settings: object) -> Iterator[Publisher]:
    publisher = Publisher(
        lab.log,
        ENGINE,
        lab.vitals,
        events=f"ipc://{path}/events",
        replay=f"ipc://{path}/replay",
        interval_s=0.005,
        **{"heartbeat_s": 0.05, **settings},
    )
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()


def run(lab: Lab, steps: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        if rng.random() < 0.4:
            lab.arrive(rng.randint(1, 40), max_tokens=rng.randint(1, 20))
        lab.step()
