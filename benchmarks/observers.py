"""The cost of observers for an engine: none, 20 that never read, 200 that do, and a replay client that asks 6,000
times.

    python -m benchmarks.observers [--repeats N] [--steps N] [--pool BLOCKS]

Each run is an engine without a model (the real scheduler, pool, event log and publisher) in a process of its own, with
its observers in another, at a fixed pace of steps. The scenarios take turns, so that all of them share the machine's
other load. CPU is of the thread that runs the steps, of all threads of the process with the drain thread, and of those
that write to sockets. Memory is resident at the end. The ratios are medians divided by those of the engine without
observers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import zmq

from benchmarks.machine import machine
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.probes.publisher import Publisher
from kvscope.monitor.probes.replay_server import AskKeyframe, encode_question

SCENARIOS = {
    "no observer": (0, 0, 0),
    "20 that never read": (20, 0, 0),
    "200 that read": (0, 200, 0),
    "a client that asks 6,000 times": (0, 0, 6_000),
}
"""Subscribers that never read, subscribers that do, and questions of a replay client that never reads."""
PACE_S = 0.005
MEASURES = ("step, µs", "CPU a step, µs", "of all threads, µs", "of ZeroMQ's, µs", "memory, MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1_500)
    parser.add_argument("--pool", type=int, default=200_000)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--observe", help=argparse.SUPPRESS)
    parser.add_argument("--scenario", default="no observer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        return engine(Path(args.engine), args.steps, args.pool)
    if args.observe:
        return observe(Path(args.observe), *SCENARIOS[args.scenario])
    print(machine("pyzmq", "msgspec"))
    results: dict[str, list[list[float]]] = {name: [] for name in SCENARIOS}
    for _ in range(args.repeats):
        for name in SCENARIOS:
            results[name].append(measured(name, args.steps, args.pool))
    print(f"\n{'':34}" + "".join(f"{measure:>20}{'ratio':>8}" for measure in MEASURES))
    base = [statistics.median(column) for column in zip(*results["no observer"], strict=True)]
    for name, runs in results.items():
        medians = [statistics.median(column) for column in zip(*runs, strict=True)]
        ratios = [value / at if at else float("nan") for value, at in zip(medians, base, strict=True)]
        cells = "".join(f"{value:20.1f}{ratio:8.2f}" for value, ratio in zip(medians, ratios, strict=True))
        print(f"{name:34}{cells}")
    columns = list(zip(*results["no observer"], strict=True))
    spreads = [(max(column) - min(column)) / (statistics.median(column) or 1) for column in columns]
    print("\nspread over the runs without observers: " + ", ".join(f"{spread:.0%}" for spread in spreads))
    return None


def measured(scenario: str, steps: int, pool: int) -> list[float]:
    """One run of one scenario."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.observers", "--steps", str(steps), "--pool", str(pool)]
        run = subprocess.Popen([*command, "--engine", folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert run.stdout is not None
        run.stdout.readline()
        observing = [*command, "--observe", folder, "--scenario", scenario]
        observer = subprocess.Popen(observing, stdout=subprocess.PIPE, text=True)
        assert observer.stdout is not None
        observer.stdout.readline()
        output, _ = run.communicate("go\n")
        observer.kill()
        observer.communicate()
        figures: list[float] = json.loads(output)
        return figures


def engine(folder: Path, steps: int, pool: int) -> None:
    """Run the steps at their pace, and print what they took."""
    lab = Lab(total=pool, block_size=16, max_num_seqs=64, max_num_batched_tokens=2048, clock=time, pack=False)
    publisher = Publisher(
        lab.log, "bench@127.0.0.1:0/0", lab.vitals, events=f"ipc://{folder}/events", replay=f"ipc://{folder}/replay"
    )
    publisher.start()
    rng = random.Random(1)
    work(lab, rng, 100)
    print("ready", flush=True)
    sys.stdin.readline()
    cpu, thread, sending = time.process_time(), time.thread_time(), sending_s()
    took = work(lab, rng, steps)
    thread, cpu = time.thread_time() - thread, time.process_time() - cpu
    sending = (sending_s() - sending) / steps * 1e6
    figures = [statistics.median(took) * 1e6, thread / steps * 1e6, cpu / steps * 1e6, sending, resident() / 2**20]
    print(json.dumps(figures), flush=True)
    os._exit(0)  # what observers have not read would be waited for


def work(lab: Lab, rng: random.Random, steps: int) -> list[float]:
    """Run steps at their pace, with 64 requests always there. Return how many seconds each took."""
    took = []
    for _ in range(steps):
        due = time.monotonic() + PACE_S
        while len(lab.scheduler.requests) < 64:
            prompt = [rng.randrange(1000) for _ in range(rng.randint(100, 1500))]
            lab.arrive(prompt, max_tokens=rng.randint(20, 300))
        began = time.perf_counter()
        lab.step()
        took.append(time.perf_counter() - began)
        time.sleep(max(0.0, due - time.monotonic()))
    return took


def sending_s() -> float:
    """Return the CPU time of ZeroMQ's threads, which write to the observers' sockets."""
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("ZMQbg"):
            ticks += sum(map(int, (task / "stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def observe(folder: Path, idle: int, reading: int, questions: int) -> None:
    """Connect the observers of a scenario, and read until killed."""
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 2_000)
        sockets = [context.socket(zmq.SUB) for _ in range(idle + reading)]
        poller = zmq.Poller()
        for number, socket in enumerate(sockets):
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.setsockopt(zmq.RCVHWM, 1 if number < idle else 1_000)
            socket.connect(f"ipc://{folder}/events")
            if number >= idle:
                poller.register(socket, zmq.POLLIN)
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.connect(f"ipc://{folder}/replay")
        time.sleep(0.5)
        print("ready", flush=True)
        for _ in range(questions):
            dealer.send(encode_question(AskKeyframe()))
        while True:
            for socket, _ in poller.poll(1_000):
                for _ in range(100):
                    if not socket.poll(0):
                        break
                    socket.recv_multipart()


if __name__ == "__main__":
    main()
