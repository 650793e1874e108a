"""Leaks brought about by a fault of the real scheduler; with `fault=False` the same load without it."""

from __future__ import annotations

from collections.abc import Iterable

from kvscope.monitor.contract.kinds import Cause
from kvscope.monitor.detectors.detector import Settings
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


def idle_not_polled(settings: Set = (), *, fault: bool = True, lease_s: float = 0.0) -> Watched:
    """Three requests have ended, what the connector kept of them is sent, and the idle engine does not ask."""
    scene = Watched(settings, connector_share=1.0, lease_s=lease_s, faults=on("leak.idle-not-polled", fault))
    for n in range(3):
        scene.lab.arrive(10 + n, max_tokens=4)
    scene.run_until_idle()
    return scene


def deferred_free_stalled(settings: Set = (), *, fault: bool = True, keys: str = "") -> Watched:
    """Four requests are aborted, each while a step runs that may write to its blocks; all these steps end."""
    faults = on("leak.deferred-free-stalled", fault, keys)
    scene = Watched(settings, async_scheduling=True, prefix_caching=False, faults=faults)
    for tokens in (16, 20, 24, 28):
        request = scene.lab.arrive(tokens, max_tokens=40)
        scene.steps(4)
        scene.lab.abort(request)
        scene.steps(3)
    return scene


def lease_burst(
    settings: Set = (), *, fault: bool = True, keys: str = "", lease_s: float = 5.0, total: int = 201
) -> Watched:
    """Eight requests have ended; the word that some of their blocks were sent is dropped, and a lease has to end it."""
    faults = on("leak.lease-burst", fault, keys)
    scene = Watched(settings, total=total, connector_share=1.0, lease_s=lease_s, prefix_caching=False, faults=faults)
    for tokens in range(32, 40):
        scene.lab.arrive(tokens, max_tokens=2)
    scene.run_until_idle()
    scene.steps(5)
    return scene


def rising_floor(settings: Set = (), *, fault: bool = True, drains: int = 5) -> Watched:
    """The engine drains to idle some times; of each request that has ended well, the last block is not given back."""
    scene = Watched(settings, total=129, faults=on("leak.rising-floor", fault))
    for _ in range(drains):
        scene.lab.arrive(20, max_tokens=4)
        scene.lab.arrive(24, max_tokens=4)
        scene.run_until_idle()
        scene.live(1)
    return scene


def encoder_cache(settings: Set = (), *, others: bool = False) -> Watched:
    """Two requests are passed over for the encoder: such an engine's words, for this one serves text alone.

    With `others` a third one goes on meanwhile.
    """
    scene = Watched(settings, total=201)
    waiting = [scene.lab.arrive(8) for _ in range(2)]
    for request in waiting:
        scene.lab.scheduler.waiting.remove(request)
        scene.lab.passed_over += 1
        scene.lab.log.not_scheduled(request.number, Cause.ENCODER, 1)
    if others:
        scene.lab.arrive(8, max_tokens=700)
    scene.steps(1)
    return scene
