"""Where `monitor serve` spends processor time, from the socket to the finding: with 1, 10, 25 and 50 engines.

    python -m benchmarks.end_to_end [--seconds N] [--engines E …]

Engines without models publish real streams from a process of their own, at two rates. The service's time is fitted as a
fixed part, a part for each engine and a part for each block event: a benchmark of events alone leaves out the middle
one. Processor time of the service's process, so that other work on the machine adds as little as can be.
"""

from __future__ import annotations

import argparse
import time
from typing import Final, NamedTuple

import numpy as np

from benchmarks.machine import machine
from kvscope.lab.chaos.service_process import ServiceProcess, process_cost
from kvscope.lab.chaos.soak import FleetProcess, running_soak

STEPS_PER_S: Final = (1.0, 8.0)
WARM_UP_S: Final = 10.0


class Measured(NamedTuple):
    """One measurement. cpu_s: the service's time in `seconds`. block_events: the events that the engines published in
    them.
    """

    engines: int
    seconds: float
    block_events: int
    batches: int
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 10, 25, 50], metavar="E")
    parsed = parser.parse_args()
    print(machine("msgspec", "pyzmq"), flush=True)
    print(f"\n{'engines':>8}{'batches/s':>11}{'block events/s':>16}{'of a core':>11}{'µs a block event':>18}")
    rows = [measured(engines, rate, parsed.seconds) for engines in parsed.engines for rate in STEPS_PER_S]
    fixed, of_engine, of_event = fitted_costs(rows)
    print(
        f"\nfitted: {1e3 * fixed:.1f} ms a second, {1e3 * of_engine:.2f} ms a second for each engine,"
        f" {1e6 * of_event:.2f} µs for each block event"
    )


def measured(engines: int, steps_per_s: float, seconds: float) -> Measured:
    """Let so many engines publish, measure for so long, and print a line."""
    with running_soak(engines, steps_per_s, "") as (fleet, service):
        time.sleep(WARM_UP_S)
        row = measured_row(engines, seconds, fleet, service)
    print(
        f"{engines:>8}{row.batches / row.seconds:>11,.0f}{row.block_events / row.seconds:>16,.0f}"
        f"{row.cpu_s / row.seconds:>11.1%}{1e6 * row.cpu_s / row.block_events:>18.1f}",
        flush=True,
    )
    return row


def measured_row(engines: int, seconds: float, fleet: FleetProcess, service: ServiceProcess) -> Measured:
    """Measure from one report of the engines' process, which come every five seconds, to the first after `seconds`."""
    first, began_s = fleet.next_report(), process_cost(service.process.pid).cpu_s
    time.sleep(seconds)
    last, ended_s = fleet.next_report(), process_cost(service.process.pid).cpu_s
    block_events = last.block_events - first.block_events
    return Measured(engines, last.at_s - first.at_s, block_events, last.batches - first.batches, ended_s - began_s)


def fitted_costs(rows: list[Measured]) -> tuple[float, float, float]:
    """Return seconds of processor time for a second, for an engine's second and for a block event: least squares."""
    shape = np.array([[1.0, row.engines, row.block_events / row.seconds] for row in rows])
    taken = np.array([row.cpu_s / row.seconds for row in rows])
    fixed, of_engine, of_event = np.linalg.lstsq(shape, taken, rcond=None)[0]
    return float(fixed), float(of_engine), float(of_event)


if __name__ == "__main__":
    main()
