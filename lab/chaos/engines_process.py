"""Engines of one process for the chaos run: they publish, keep journals, and leak while a file exists.

python -m kvscope.lab.chaos.engines_process FOLDER FIRST COUNT FIRST_PORT

Engine N publishes at tcp://127.0.0.1:PORT, or at ipc://FOLDER/events-N if FIRST_PORT is 0. It keeps its journal in
FOLDER/journal-N, and while FOLDER/leak-N exists its KV connector never reports that the blocks of finished requests
were sent: leak.finished-held. The file outlives the process, so a restarted engine leaks again. Prints
`ready`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

from kvscope.monitor.probes.publisher import Publisher

from ..stepped_engine import Lab

NEVER: Final = 1 << 60
STEP_EVERY_S: Final = 0.1
REQUEST_EVERY_S: Final = 1.0
CHAOS_POOL: Final = 65


def chaos_engine_name(number: int) -> str:
    """Return the name of an engine of the chaos run."""
    return f"chaos-{number}@127.0.0.1:0/0"


def events_port(first_port: int, number: int) -> int:
    """Return the port of an engine's events; its replay socket has the next one."""
    return first_port + 2 * number


def endpoints_of(folder: Path, number: int, first_port: int) -> tuple[str, str]:
    """Return where an engine publishes, and where its replay socket is."""
    if not first_port:
        return f"ipc://{folder}/events-{number}", f"ipc://{folder}/events-{number}-replay"
    port = events_port(first_port, number)
    return f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"


class TroubledEngine:
    """A real pool and scheduler that publish, with a request now and then."""

    def __init__(self, folder: Path, number: int, first_port: int) -> None:
        name = chaos_engine_name(number)
        events, replay = endpoints_of(folder, number, first_port)
        self._leak = folder / f"leak-{number}"
        self._asked_s = 0.0
        self.lab = Lab(total=CHAOS_POOL, connector_share=1.0, clock=time, pack=False, engine=name, seed=number)
        self.publisher = Publisher(
            self.lab.log,
            name,
            self.lab.vitals,
            events=events,
            replay=replay,
            journal_dir=folder / f"journal-{number}",
            heartbeat_s=0.5,
        )

    def step(self) -> None:
        """Run one step, and let a request arrive if it is time."""
        connector = self.lab.connector
        assert connector is not None
        leaks = self._leak.exists()
        has_held = bool(connector._pending)
        if time.monotonic() - self._asked_s > REQUEST_EVERY_S and not (leaks and has_held):
            self._asked_s = time.monotonic()
            self.lab.arrive(20, max_tokens=2)
        for number in connector._pending:
            connector._pending[number] = NEVER if leaks else 0
        self.lab.step()


def main() -> None:
    """Run until killed."""
    folder, first, count, first_port = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    engines = [TroubledEngine(folder, number, first_port) for number in range(first, first + count)]
    for engine in engines:
        engine.publisher.start()
    print("ready", flush=True)
    while True:
        for engine in engines:
            engine.step()
        time.sleep(STEP_EVERY_S)


if __name__ == "__main__":
    main()
