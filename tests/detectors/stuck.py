"""Requests that are stuck by a fault of the real scheduler; with `fault=False` the same load without it."""

from __future__ import annotations

from kvscope.engine.requests.request import Request
from kvscope.monitor.contract.kinds import Cause, Status
from tests.detectors.leaks import Set, fetching, on
from tests.detectors.scenes import Watched


def remote_load(settings: Set = (), *, fault: bool = True, keys: str = ":limit=1") -> Watched:
    """Four requests have KV fetched for them; the end of some of these fetches is not taken in."""
    scene = fetching(settings, faults=on("stuck.remote-load", fault, keys))
    for _ in range(4):
        scene.lab.arrive(40)
    scene.steps(20)
    return scene


def promotion_starved(settings: Set = (), *, fault: bool = True) -> Watched:
    """What the first of two waited for has come, and the scheduler never puts it back in the queue."""
    scene = fetching(settings, faults=on("stuck.promotion-starved", fault, ":limit=1"))
    scene.lab.arrive(40)
    scene.lab.arrive(40)
    scene.steps(20)
    return scene


def parked_loads(settings: Set = (), *, fault: bool = True) -> Watched:
    """What the head of the queue lacks is held by the one behind it, whose KV has come."""
    scene = fetching(settings, total=24, faults=on("stuck.parked-loads", fault))
    scene.lab.arrive(48, max_tokens=8)
    scene.lab.arrive(48, max_tokens=8)
    scene.steps(10)
    return scene


def lost_wakeup(settings: Set = ()) -> tuple[Watched, Request]:
    """An engine sleeps as KV is fetched for its only request; the connector's thread says that it has come."""
    scene = fetching(settings)
    assert scene.lab.connector is not None
    scene.lab.connector.polls_needed = 1_000
    request = scene.lab.arrive(40)
    while request.number not in scene.lab.scheduler.parked:
        scene.steps(1)
    scene.beat(12)
    scene.lab.log.fetch_ended(request.number)
    scene.lab.take()
    return scene, request


def grammar(settings: Set = ()) -> tuple[Watched, Request]:
    """One of two requests waits for its grammar."""
    scene = Watched(settings)
    scheduler = scene.lab.scheduler
    request, _ = scene.lab.arrive(8), scene.lab.arrive(8, max_tokens=200)
    scheduler.waiting.remove(request)
    scheduler.state.park(request, Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    scene.steps(1)
    return scene, request


def encoder_budget(settings: Set = ()) -> tuple[Watched, Request]:
    """One of two requests is passed over for the encoder: such an engine's words, for this one serves text alone."""
    scene = Watched(settings, total=201)
    request, _ = scene.lab.arrive(8), scene.lab.arrive(8, max_tokens=400)
    scene.lab.scheduler.waiting.remove(request)
    scene.lab.passed_over += 1
    scene.lab.log.not_scheduled(request.number, Cause.ENCODER, 1)
    scene.steps(1)
    return scene, request


def zero_token(settings: Set = (), *, fault: bool = True) -> Watched:
    """One of two requests runs, and gets nothing once it decodes."""
    scene = Watched(settings, faults=on("stuck.zero-token", fault, ":limit=1"))
    scene.lab.arrive(8, max_tokens=100)
    scene.lab.arrive(8, max_tokens=100)
    scene.steps(10)
    return scene


def front_end(settings: Set = ()) -> Watched:
    """Two requests are received; one of them arrives."""
    scene = Watched(settings)
    scene.lab.log.received(2, "lost", 8)
    scene.lab.log.received(1, "r-1", 8)
    scene.lab.arrive(8, max_tokens=4)
    scene.run_until_idle()
    return scene


def self_preempt(settings: Set = (), *, fault: bool = True) -> tuple[Watched, Request]:
    """A request outgrows the pool, which two can not share for long."""
    scene = Watched(settings, total=9, faults=on("stuck.self-preempt", fault))
    request = scene.lab.arrive(12, max_tokens=100, name="grows")
    scene.lab.arrive(8, max_tokens=2)
    return scene, request


def head_of_line(settings: Set = (), *, fault: bool = True) -> tuple[Watched, Request]:
    """A request is let in only if all that it may become has room, which one that runs leaves for no time to come."""
    scene = Watched(settings, total=1025, faults=on("stuck.head-of-line", fault, ":after=1:limit=1"))
    scene.lab.arrive(100, max_tokens=2_000)
    scene.steps(1)
    head = scene.lab.arrive(20, max_tokens=4_000, name="long")
    scene.lab.arrive(20, max_tokens=4, name="short")
    scene.steps(5)
    return scene, head
