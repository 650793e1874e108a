"""A lab that publishes, in a process of its own that a test can stop, freeze or kill.

python -m kvscope.lab.stepped_process EVENTS REPLAY JOURNAL SEED [FAULT…]
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from kvscope.monitor.probes.publisher import Publisher

from .stepped_engine import Lab


def main() -> None:
    events, replay, journal, seed, *faults = sys.argv[1:]
    lab = Lab(total=200, connector_share=0.3, faults=faults, clock=time, pack=False, seed=int(seed))
    publisher = Publisher(
        lab.log,
        os.environ.get("KVSCOPE_ENGINE_ID", "lab@127.0.0.1:0/0"),
        lab.vitals,
        events=events,
        replay=replay,
        journal_dir=Path(journal) if journal else None,
        heartbeat_s=0.2,
    )
    publisher.start()
    print("ready", flush=True)
    rng = random.Random(seed)
    while True:
        if len(lab.scheduler.requests) < 30:
            lab.arrive(rng.randint(1, 60), max_tokens=rng.randint(1, 30))
        lab.step()
        time.sleep(0.002)


if __name__ == "__main__":
    main()
