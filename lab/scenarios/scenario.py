"""The definition of a scenario, and how several are made of one fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.registry import THRESHOLDS

from ..client_load import Clients
from ..simulated_run import Named, SimulatedRun, affected, exactly, triggers

AT_FIRST: Final = triggers(1)
THE_AFFECTED: Final = exactly(affected)
ClientLoad = tuple[Clients, ...]
Engine = Mapping[str, Any]


class ShownByHand(NamedTuple):
    """Codes, as a pattern, that no scenario shows, and why."""

    codes: str
    why: str


@dataclass(frozen=True, eq=False)
class Scenario:
    """One way to cause an incident. `code` is empty for a healthy engine.

    fault: as `--fault` takes it, or empty where the load alone causes it, which `onset` then must detect. engine:
    EngineConfig's fields. step_s: the least that a step takes. grace: thresholds, in seconds, that the class waits for.
    waits_s: its other waits. requests, blocks: the ids that a finding must name (None: not checked). consequences:
    other codes that may rightly be found.
    """

    name: str
    code: str = ""
    fault: str = ""
    engine: Engine = field(default_factory=dict)
    load: ClientLoad = ()
    seconds: float = 40.0
    step_s: float = 0.02
    grace: tuple[str, ...] = ()
    waits_s: float = 0.0
    onset: Callable[[SimulatedRun], bool] = AT_FIRST
    requests: Callable[[SimulatedRun], Named] | None = THE_AFFECTED
    blocks: Callable[[SimulatedRun], Named] | None = None
    consequences: frozenset[str] = frozenset()

    def grace_s(self, settings: Settings) -> float:
        """Return the pending period of the class itself."""
        return self.waits_s + sum(settings(THRESHOLDS[name]) for name in self.grace)


class Way(NamedTuple):
    """One of the ways to cause an incident. keys: how often the fault triggers, as `--fault` takes it."""

    name: str
    engine: Engine
    load: ClientLoad
    keys: str = ""


def incident(code: str, *ways: Way, **asked: Any) -> list[Scenario]:
    """Return a scenario for each way. `asked` is shared by all of them."""
    return [
        Scenario(f"{code}{way.keys} {way.name}", code, f"{code}{way.keys}", way.engine, way.load, **asked)
        for way in ways
    ]
