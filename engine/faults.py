"""Faults that can be switched on by name, to see an incident of the catalogue happen for real.

`--fault CODE[:key=value]…` breaks one mechanism of the engine at one named place (PLACES). The events stay true. While
a fault is on, the engine's description, its log and every page of the monitor show it.

    key    meaning                                                             default
    -----  ------------------------------------------------------------------  -----------------
    every  trigger at each N-th chance                                         1
    after  skip the first N chances                                            0
    limit  trigger at most N times                                              no limit

A chance is one execution of the place, or one request for faults of requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

PLACES: Final = {
    "leak.deferred-free-stalled": "KVCacheManager.reclaim: the end of the step that fences a free is missed",
    "leak.external-pins": "HostConnector.loaded: blocks pinned for a fetch are not unpinned",
    "leak.finished-held": "Scheduler.take_completions: a connector's completion is not delivered",
    "leak.idle-not-polled": "Scheduler.take_completions: with no request to run, the connector is not polled",
    "leak.lease-burst": "Scheduler.take_completions: a completion is not delivered, and a lease has to end it",
    "leak.rising-floor": "KVCacheManager.free: the last block of a finished request is not freed",
    "leak.remote-load-lost": "Scheduler.take_loads: the end of a fetch whose request was aborted is ignored",
    "leak.unaccounted": "KVCacheManager.free: the free of an aborted request is skipped",
    "stuck.never-fits": "EngineCore.check: a prompt that needs more blocks than the pool has is accepted",
    "stuck.self-preempt": "Scheduler: a request that fills the pool is not ended, and is admitted again",
    "stuck.head-of-line": "Scheduler._room_for: a request is admitted only if its whole max_tokens have room too",
    "stuck.engine-stalled": "EngineCore: a step never returns from the model",
    "stuck.front-end": "EngineCore.submit: a request is not handed to the scheduler",
    "stuck.grammar": "EngineCore._take_grammars: the result of a grammar compilation, or its failure, is ignored",
    "stuck.lost-wakeup": "EngineCore: the connector's call that a fetch has ended does not wake the engine",
    "stuck.parked-loads": "Scheduler._unblock: waiting requests keep their fetched blocks",
    "stuck.promotion-starved": "Scheduler._promote: a request that is ready is not put back in the queue",
    "stuck.remote-load": "Scheduler.take_loads: the end of a fetch is ignored",
    "stuck.zero-token": "Scheduler: a running request's share of each step is floored to 0 tokens once it decodes",
    "thrash.preemption": "KVCacheManager.allocate: a prompt is admitted though only its first chunk has room",
    "thrash.cascade": "Scheduler._schedule_running: blocks about to be freed do not count, so more are preempted",
    "thrash.after-retract": "Scheduler.schedule: the limit that a preemption lowered is not raised again",
    "collapse.lockstep": "Scheduler.schedule: decodes get no tokens of a step while there are prompts to compute",
    "collapse.cache-flushed": "BlockPool.release: the prefix of a request goes to the front of the free queue",
    "collapse.preempt-all": "Scheduler: when one request would be preempted, all are",
    "collapse.prefix-hits": "KVCacheManager.find_prefix: a lookup misses what is stored",
    "sizing.kv-too-small": "make_plan: the pool takes a sixth of what is left for KV, unless its blocks are given",
    "sizing.kv-too-large": "make_plan: the pool is sized without room for graphs, and uses the headroom as well",
    "sizing.overreserved": "make_plan: the estimate for graphs adds up all sizes as if they shared no memory",
    "sizing.bad-suggestion": "Plan._besides_kv: the suggested size subtracts graphs twice, estimated and captured",
    "sizing.elsewhere": "ModelRunner: the logits of a step are never freed",
    "corrupt.counter-drift": "BlockPool.release: cached blocks that become idle are not counted",
    "corrupt.double-free": "KVCacheManager.free: a finished request's blocks are freed twice",
    "corrupt.use-after-free": "KVCacheManager.free: blocks that a step in flight still uses are freed at once",
}


MAX_TRIGGERED: Final = 10_000


@dataclass
class Fault:
    """One fault that is on: its parameters, the chances it had, and the requests on which it triggered."""

    code: str
    every: int = 1
    after: int = 0
    limit: int = 0
    chances: int = 0
    affected: list[str] = field(default_factory=list)
    """Ids of the requests on which it triggered, the first MOST_STRUCK of them."""
    triggers: int = 0
    decided: dict[str, bool] = field(default_factory=dict)

    def __str__(self) -> str:
        keys = {"every": self.every != 1, "after": self.after, "limit": self.limit}
        return self.code + "".join(f":{key}={getattr(self, key)}" for key, given in keys.items() if given)


class Faults:
    """The faults that are on. Empty, which is the default, it never triggers."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.on = {fault.code: fault for fault in faults}

    def triggers(self, code: str, request: str) -> bool:
        """Whether the fault `code` breaks its place now, for this request."""
        fault = self.on.get(code)
        if fault is None:
            return False
        fault.chances += 1
        due = fault.chances > fault.after and (fault.chances - fault.after - 1) % fault.every == 0
        if not due or (fault.limit and fault.triggers >= fault.limit):
            return False
        fault.triggers += 1
        if len(fault.affected) < MAX_TRIGGERED:
            fault.affected.append(request)
        return True

    def triggers_on_request(self, code: str, request: str) -> bool:
        """Return the same for faults that stay with a request: decided at its first chance, and so from then on."""
        fault = self.on.get(code)
        if fault is None:
            return False
        if request not in fault.decided:
            fault.decided[request] = self.triggers(code, request)
        return fault.decided[request]

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Faults:
        """From the command line's `CODE[:key=value]…`. Raises ValueError, naming what is wrong and what there is."""
        return cls(parse_fault(text) for text in texts)


def parse_fault(text: str) -> Fault:
    """One fault as the command line gives it."""
    code, *pairs = text.split(":")
    if code not in PLACES:
        raise ValueError(f"--fault {text}: there is no fault {code!r}; there are {', '.join(sorted(PLACES))}")
    fault = Fault(code)
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in ("every", "after", "limit") or not value.isdecimal():
            raise ValueError(f"--fault {text}: {pair!r} is not every=N, after=N or limit=N with a whole number N")
        setattr(fault, key, int(value))
    if fault.every < 1:
        raise ValueError(f"--fault {text}: every must be at least 1")
    return fault
