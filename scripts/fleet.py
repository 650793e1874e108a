"""`make fleet`: three NATS nodes, four agents, two hubs and 50 engines without models, with incidents and a dead agent.

FLEET_SECONDS=N ends it so long after the summary: exit code 0 if both hubs show every incident and no other leak, 1 if
not. Without it, it goes on until Ctrl-C. Either way nothing is left running.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

import httpx2
from rich.console import Console
from rich.table import Table

from kvscope.lab.chaos.engines_process import chaos_engine_name
from tests.fleet.fleet_lab import LEAK_CODE, FleetLab, Service, running_fleet, wait_moved
from tests.waiting import until

FLEET_SIZE, FLEET_AGENTS, FLEET_HUBS = 50, 4, 2
TROUBLED: Final = (3, 11, 19, 27, 42)
SHOWN_S: Final = 120.0
console = Console(highlight=False, width=120)


def main() -> int:
    """Run it. Return the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    engines = int(os.environ.get("FLEET_ENGINES", FLEET_SIZE))
    with tempfile.TemporaryDirectory(prefix="kvscope-fleet-") as folder, contextlib.suppress(KeyboardInterrupt):
        console.print(f"3 NATS nodes, {FLEET_AGENTS} agents, {FLEET_HUBS} hubs and {engines} engines start …")
        began_s = time.monotonic()
        with running_fleet(Path(folder), engines, FLEET_AGENTS, FLEET_HUBS) as lab:
            for hub in lab.hubs:
                until(functools.partial(answers_for, hub, engines), f"{hub.name} shows every engine", SHOWN_S)
                console.print(f"  {hub.name}  {hub.url}/fleet")
            console.print(f"every engine is on both hubs after {time.monotonic() - began_s:.0f} s\n")
            return incidents(lab, [number for number in TROUBLED if number < engines])
    return 0


def incidents(lab: FleetLab, troubled: list[int]) -> int:
    """Cause leaks, kill an agent, print the hubs' pages, and wait. Return the exit code."""
    console.print(f"KV connectors of {len(troubled)} engines stop reporting that transfers ended")
    for number in troubled:
        lab.set_leak(number, True)
    wanted = {chaos_engine_name(number) for number in troubled}
    until(lambda: all(leaks_of(hub) == wanted for hub in lab.hubs), "both hubs show every leak", SHOWN_S)
    before = Counter(lab.owners().values())
    killed = max(lab.agents, key=lambda agent: before[agent.name])
    had = {engine for engine, agent in lab.owners().items() if agent == killed.name}
    console.print(f"SIGKILL to {killed.name}, which processes {len(had)} engines")
    killed_ns = time.time_ns()
    killed.kill()
    seconds = wait_moved(lab, had, killed_ns, killed.name)
    console.print(f"other agents describe all of them {seconds:.1f} s later\n")
    shown = [leaks_of(hub) == wanted for hub in lab.hubs]
    print_findings(lab)
    for hub, is_right in zip(lab.hubs, shown, strict=True):
        console.print(f"{hub.name}: {'the leaks that were caused, and no other' if is_right else 'other leaks'}")
    wait_s = float(os.environ.get("FLEET_SECONDS", "inf"))
    if wait_s == float("inf"):
        console.print("\nCtrl-C ends it")
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s:
        time.sleep(min(0.5, max(0.0, until_s - time.monotonic())))
    return 0 if all(shown) else 1


def answers_for(hub: Service, engines: int) -> bool:
    """Whether a hub shows so many engines."""
    with contextlib.suppress(httpx2.HTTPError):
        return len(hub.ask("/api/fleet_overview")["engines"]) == engines
    return False


def leaks_of(hub: Service) -> set[str]:
    """Return the engines whose leak a hub shows."""
    return {each["engine"] for each in hub.ask("/api/findings", state="firing") if each["code"] == LEAK_CODE}


def print_findings(lab: FleetLab) -> None:
    """Print the findings of the first hub beyond information, and which agent has the engine now."""
    owners = lab.owners()
    table = Table("engine", "agent", "finding", "verdict", "since", box=None)
    found = lab.hubs[0].ask("/api/findings", state="firing")
    for each in (finding for finding in found if finding["severity"] != "info"):
        table.add_row(each["engine"], owners[each["engine"]], each["code"], each["verdict"], str(each["since"]))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
