"""The cost of the probe for vLLM's front end: CPU time of a request in its OutputProcessor, with the hooks and without.

    python -m benchmarks.front_end --vllm-python PYTHON [--rounds N]

PYTHON is that of an environment with vLLM in it. Tokenizing, HTTP and the way to the engine's process are left out, so
the share is the highest that a request can have.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import threading
from pathlib import Path

import zmq

from benchmarks.machine import machine
from benchmarks.vllm_probe import ENVIRONMENT, ROOT

TOKENS = (1, 32, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, metavar="PYTHON", help="the Python that has vLLM")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    print(machine("msgspec"))
    with tempfile.TemporaryDirectory() as directory, zmq.Context() as context:
        endpoint = f"ipc://{Path(directory) / 'inbox'}"
        with context.socket(zmq.PULL) as inbox:
            inbox.bind(endpoint)
            over = threading.Event()
            reader = threading.Thread(target=drain, args=(inbox, over))
            reader.start()
            command = [arguments.vllm_python, "-m", "benchmarks.front_end_process", endpoint, str(arguments.rounds)]
            done = subprocess.run(
                [*command, *map(str, TOKENS)], capture_output=True, text=True, cwd=ROOT, env=os.environ | ENVIRONMENT
            )
            over.set()
            reader.join()
    if done.returncode:
        raise SystemExit(done.stderr)
    measured = json.loads(done.stdout.splitlines()[-1])
    rounds = measured[str(TOKENS[0])]
    cost = statistics.median(hooked[0] - without[0] for without, hooked in rounds)
    beside = statistics.median((b[1] - b[0]) - (a[1] - a[0]) for a, b in rounds)
    print(f"\nthe hooks take {cost:.0f} µs of CPU time a request, when it comes and when it ends;", end="")
    print(f" {beside:.0f} µs in the I/O thread; medians of {arguments.rounds}")
    print(f"{'tokens':>8}{'OutputProcessor, µs':>22}{'share':>8}")
    for tokens in TOKENS:
        off = statistics.median(without[0] for without, _ in measured[str(tokens)])
        print(f"{tokens:>8}{off:22.0f}{cost / off:8.1%}")


def drain(inbox: zmq.Socket[bytes], over: threading.Event) -> None:
    """Take the reports, as the engine's drain thread does."""
    while not over.is_set():
        if inbox.poll(50):
            inbox.recv()


if __name__ == "__main__":
    main()
