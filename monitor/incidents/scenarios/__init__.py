"""What is brought about: the table of incidents, and that of healthy engines.

An incident is a fault on an engine under a load for so many virtual seconds. Each code has three ways or more, which
differ in how often the fault strikes, in the engine's shape and in what its clients do. Beside them stands what the
judge asks of the monitor: from when on it is there (`onset`), how long the class itself waits (`grace`), whom it
strikes, and what else it rightly causes.

scenario.py   what a scenario is
shapes.py     engines and clients that several families have
healthy.py    engines in which nothing is to be found
The other modules are named as the families of the catalogue are.
"""

from __future__ import annotations

from typing import Final

from kvscope.monitor.incidents.scenarios.collapse_scenarios import COLLAPSE
from kvscope.monitor.incidents.scenarios.corrupt_scenarios import CORRUPT
from kvscope.monitor.incidents.scenarios.healthy_engines import HEALTHY as HEALTHY
from kvscope.monitor.incidents.scenarios.leak_scenarios import LEAKS
from kvscope.monitor.incidents.scenarios.scenario import Scenario as Scenario
from kvscope.monitor.incidents.scenarios.sizing_scenarios import SIZING
from kvscope.monitor.incidents.scenarios.stuck_scenarios import STUCK
from kvscope.monitor.incidents.scenarios.thrash_scenarios import THRASH

SHOWN_BY_HAND: Final = (
    "leak.session-pinned",
    "leak.encoder-cache",
    "stuck.encoder-budget",
    "stuck.rank-diverged",
    "sizing.block-inflated",
    "blind.*",
    "held.*",
)
"""One engine has no such part: tests/detectors has streams written by hand for these, and two engines for ranks."""

INCIDENTS: Final = (*LEAKS, *STUCK, *THRASH, *COLLAPSE, *CORRUPT, *SIZING)
SCENARIOS: Final = (*INCIDENTS, *HEALTHY)
