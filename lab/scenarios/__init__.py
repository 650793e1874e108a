"""The injected incidents: the table of incidents, and that of healthy engines.

An incident is a fault on an engine under a load for so many virtual seconds. Each fault has three ways or more, which
differ in how often the fault triggers, in the engine's shape and in what its clients do. Beside them stand the
expectations of the monitor: its beginning (`onset`), the pending period of the class (`grace`), the affected requests,
and its other rightful effects.

scenario.py        what a scenario is
shapes.py          engines and clients that several families have
healthy_engines.py engines in which nothing is to be found
shown_by_hand.py   codes that one simulated engine cannot show
The other modules are named as the families of the catalogue are. Every tuple of scenarios in a module of this folder is
in the table: a new one needs no other edit.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, Final

from kvscope.monitor.detectors.registry import CATALOGUE

from .healthy_engines import HEALTHY as HEALTHY
from .scenario import Scenario as Scenario
from .scenario import ShownByHand


def _in_modules(kind: type[Any]) -> Iterator[Any]:
    """Yield what the tuples of that kind hold, by module."""
    for found in pkgutil.iter_modules(__path__, f"{__name__}."):
        for value in list(vars(importlib.import_module(found.name)).values()):
            if isinstance(value, tuple) and value and all(isinstance(item, kind) for item in value):
                yield from value


def _incidents() -> tuple[Scenario, ...]:
    """Return every incident once: families in the order of the catalogue, and each family's as its module has them."""
    found = dict.fromkeys(scenario for scenario in _in_modules(Scenario) if scenario.code)
    families = list(dict.fromkeys(code.partition(".")[0] for code in CATALOGUE))
    return tuple(sorted(found, key=lambda scenario: families.index(scenario.code.partition(".")[0])))


SHOWN_BY_HAND: Final = tuple(dict.fromkeys(each.codes for each in _in_modules(ShownByHand)))
"""Patterns of codes: tests/detectors has streams written by hand for these, and two engines for ranks."""

INCIDENTS: Final = _incidents()
SCENARIOS: Final = (*INCIDENTS, *HEALTHY)
