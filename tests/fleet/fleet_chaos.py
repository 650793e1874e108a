"""Random faults in a fleet under load with incidents: SIGKILL, SIGSTOP and cut links of agents, hubs and NATS nodes.

    python -m tests.fleet.fleet_chaos --faults 30 --seed 1 --results fleet.jsonl [--resume]

Each round makes one engine leak before the fault and one during it. When the fault is over, the fleet has settled and
the incidents have ended:

    transitions  each incident is in the stream with its beginning and its end and no other of its code is, each by one
                 message id, and a reader that stands on what a hub stands on was sent each once
    hubs         each hub lists the findings of the stream, in the state of their last transition, each once
    history      the disks of the agents hold, together, every batch that the engines' journals hold
    takeover     agents describe the engines of one that was away for long within a lease and 30 s

Prints a line for each fault and a summary. Exits with 1 if something did not hold. A round with a problem ends the run,
because the next would begin in its state: --resume goes on after the rounds in --results, with a new fleet. Needs root
and network namespaces.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from kvscope.monitor.base.text import counted
from tests.fleet.cut_links import Machines
from tests.fleet.fleet_faults import FleetFaults, FleetRound
from tests.fleet.fleet_lab import running_fleet

NODES: Final = 3
AGENTS: Final = 4
HUBS: Final = 2
MACHINES: Final = NODES + AGENTS + HUBS


def run_rounds(
    folder: Path,
    machines: Machines,
    engines: int,
    seed: int,
    numbers: Sequence[int],
    show: Callable[[FleetRound], None],
) -> list[FleetRound]:
    """Cause the faults of these numbers in a fleet of its own, until one has a problem."""
    rounds: list[FleetRound] = []
    with running_fleet(folder, engines, AGENTS, HUBS, machines) as lab:
        names = [server.folder.name for server in lab.servers] + [each.name for each in (*lab.agents, *lab.hubs)]
        links = {name: machine.set_link for name, machine in zip(names, machines.machines, strict=True)}
        faults = FleetFaults(lab, engines, seed, links)
        for number in numbers:
            rounds.append(faults.round(number))
            show(rounds[-1])
            if rounds[-1].problems:
                break
    return rounds


def line_of(done: FleetRound) -> str:
    """Return a round as one line."""
    moved = f", {counted(done.moved, 'engine')} taken over in {done.took_over_s:.1f} s" if done.moved else ""
    verdict = "; ".join(done.problems) or "held"
    fault = f"{done.kind} {done.victim} for {done.seconds:.0f} s{moved}"
    compared = f"{done.transitions} transitions, {done.batches:,} batches"
    return f"{done.number:4}  {fault}: {verdict} ({compared}; {done.took_s:.0f} s)"


def summary_of(rounds: Sequence[FleetRound]) -> str:
    """Return how often each kind of fault came, what was compared, and how long takeovers took."""
    kinds = Counter(f"{each.kind} of {each.victim.rstrip('0123456789').rstrip('-')}" for each in rounds)
    followed: list[FleetRound | None] = [*rounds[1:], None]
    ends = [each for each, after in zip(rounds, followed, strict=True) if after is None or is_new(each, after)]
    incidents, transitions, batches = (
        sum(getattr(each, name) for each in ends) for name in ("incidents", "transitions", "batches")
    )
    lines = [
        ", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items())),
        f"{len(rounds)} faults in {len(ends)} fleets: {incidents} incidents, {transitions} transitions and"
        f" {batches:,} batches compared",
    ]
    took = [each.took_over_s for each in rounds if each.took_over_s]
    if took:
        lines.append(f"{len(took)} takeovers: median {statistics.median(took):.1f} s, worst {max(took):.1f} s")
    lines.append(f"{sum(bool(each.problems) for each in rounds)} rounds with problems")
    return "\n".join(lines)


def is_new(before: FleetRound, after: FleetRound) -> bool:
    """Whether a round began a fleet of its own: what was compared begins anew."""
    return after.incidents <= before.incidents


def main() -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fleet.fleet_chaos")
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--engines", type=int, default=12)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--resume", action="store_true")
    parsed = parser.parse_args()
    rounds: list[FleetRound] = []
    if parsed.results is not None and parsed.resume and parsed.results.exists():
        rounds = [msgspec.json.decode(line, type=FleetRound) for line in parsed.results.read_bytes().splitlines()]
    elif parsed.results is not None:
        parsed.results.unlink(missing_ok=True)
    load = os.getloadavg()[0]
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, load {load:.0f}: {' '.join(sys.argv[1:])}")
    print(f"seed {parsed.seed}; {len(rounds)} faults were caused before", flush=True)

    def show(done: FleetRound) -> None:
        print(line_of(done), flush=True)
        if parsed.results is not None:
            with parsed.results.open("ab") as file:
                file.write(msgspec.json.encode(done) + b"\n")

    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each connection that a node loses
    machines = Machines(MACHINES)
    try:
        if machines.reason:
            raise SystemExit(f"links cannot be cut here: {machines.reason}")
        with tempfile.TemporaryDirectory(prefix="kvscope-fleet-") as folder:
            numbers = range(len(rounds), parsed.faults)
            rounds += run_rounds(Path(folder), machines, parsed.engines, parsed.seed, numbers, show)
    finally:
        machines.close()
    print(summary_of(rounds))
    return 1 if any(each.problems for each in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
