"""Leaks brought about by a fault of the real scheduler; with `fault=False` the same load without it."""

from __future__ import annotations

from collections.abc import Iterable

from monitor.detectors.thresholds import Settings
from tests.detectors.scenes import Watched

Set = Iterable[str] | Settings


def on(code: str, fault: bool, keys: str = "") -> list[str]:
    return [code + keys] if fault else []


def fetching(settings: Set = (), **lab: object) -> Watched:
    """Every request finds all that it looks for elsewhere, and it comes with the next poll."""
    scene = Watched(settings, load_share=1.0, **lab)
    connector = scene.lab.connector
    assert connector is not None
    connector.failing, connector.whole, connector.polls_needed = 0.0, True, 1
    return scene


def remote_load_lost(settings: Set = (), *, fault: bool = True, keys: str = "") -> Watched:
    """Four requests are aborted while KV is fetched for them; the end of some of these fetches is not taken in."""
    scene = fetching(settings, faults=on("leak.remote-load-lost", fault, keys))
    for tokens in (20, 24, 28, 32):
        request = scene.lab.arrive(tokens)
        while request.number not in scene.lab.scheduler.parked:
            scene.steps(1)
        scene.lab.abort(request)
    scene.steps(3)
    return scene


def idle_not_polled(settings: Set = (), *, fault: bool = True) -> Watched:
    """Three requests have ended, what the connector kept of them is sent, and the idle engine does not ask."""
    scene = Watched(settings, connector_share=1.0, faults=on("leak.idle-not-polled", fault))
    for n in range(3):
        scene.lab.arrive(10 + n, max_tokens=4)
    scene.run_until_idle()
    return scene
