"""A change of behaviour that no table lists: one drawn method of vLLM's scheduler does something else than it should.

The method is skipped, repeated or delayed, gives what it gave before, loses or swaps elements of a list, or a counter
stands still. Whether a client is harmed by it, the episode's end shows.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from inspect import unwrap
from types import CodeType
from typing import Any, Final

from .vllm_engine import VllmEngine

KINDS: Final = ("skip", "repeat", "delay", "stale", "drop", "swap", "freeze")
SHARES: Final = (1.0, 0.3, 0.03)
"""The shares of the calls that go wrong."""
TRIED: Final = 0.05
"""The share of the episode after which a change that made no difference yields to another."""
WHOLE_PASSES: Final = frozenset(("schedule", "update_from_output", "shutdown"))
"""Not the behaviour of a part: without them there is no engine."""


class Mutation:
    """Notes which methods the engine calls until a drawn moment, and changes one of them or a counter from then on."""

    def __init__(self, engine: VllmEngine, rng: random.Random) -> None:
        self.engine, self.rng = engine, rng
        self.parts = _parts(engine.vllm)
        self.counters = self._counters()
        self.called: set[CodeType] = set()
        self.moving: list[tuple[str, str]] = []
        """Parts and their counters that have changed until then."""
        self.methods: list[tuple[str, str]] = []
        self.made_a_difference = False
        sys.setprofile(lambda frame, event, _argument: self.called.add(frame.f_code) if event == "call" else None)
        engine.at(rng.uniform(0.05, 0.3) * engine.draw.base.seconds, self._begin)

    def _counters(self) -> dict[tuple[str, str], int]:
        return {
            (part, name): value
            for part, target in self.parts.items()
            for name, value in sorted(vars(target).items())
            if type(value) is int
        }

    def _begin(self) -> None:
        sys.setprofile(None)
        self.moving = [place for place, value in self._counters().items() if self.counters.get(place) != value]
        self.methods = [(part, name) for part, it in self.parts.items() for name in _methods(it, self.called)]
        self._change()

    def _change(self) -> None:
        kind = self.rng.choice(KINDS if self.moving else KINDS[:-1])
        part, name = self.rng.choice(self.moving if kind == "freeze" else self.methods)
        target = self.parts[part]
        if kind == "freeze":
            self.engine.mutation = f"{part}.{name} stands still"
            different = self._with_frozen(target, name)
            target, name = self.engine.vllm, "schedule"
        else:
            share = self.rng.choice(SHARES)
            self.engine.mutation = f"{kind} {part}.{name}, {share:.0%} of calls"
            different = changed(getattr(target, name), kind, lambda: self.rng.random() < share, self._differs)
        usual = getattr(target, name)
        setattr(target, name, different)
        self.engine.at(TRIED * self.engine.draw.base.seconds, lambda: self._another(target, name, usual))

    def _another(self, target: Any, name: str, usual: Callable[..., Any]) -> None:
        if not self.made_a_difference:
            setattr(target, name, usual)
            self._change()

    def _differs(self) -> None:
        self.made_a_difference = True

    def _with_frozen(self, target: Any, name: str) -> Callable[[], Any]:
        """Return `schedule`, which sets the counter back to what it is now before every pass."""
        schedule, frozen = self.engine.vllm.schedule, getattr(target, name)

        def scheduled() -> Any:
            if getattr(target, name) != frozen:
                self._differs()
            setattr(target, name, frozen)
            return schedule()

        return scheduled


def _parts(scheduler: Any) -> dict[str, Any]:
    manager = scheduler.kv_cache_manager
    parts = {
        "scheduler": scheduler,
        "manager": manager,
        "pool": manager.block_pool,
        "free queue": manager.block_pool.free_block_queue,
        "coordinator": manager.coordinator,
        "tables": manager.coordinator.single_type_managers[0],
        "waiting": scheduler.waiting,
    }
    return parts if scheduler.connector is None else parts | {"connector": scheduler.connector}


def _methods(target: Any, called: set[CodeType]) -> list[str]:
    """Return the names of its methods that were called."""
    functions = {name: getattr(type(target), name) for name in dir(type(target)) if not name.startswith("__")}
    return [
        name
        for name, function in sorted(functions.items())
        if name not in WHOLE_PASSES and getattr(unwrap(function), "__code__", None) in called
    ]


def changed(
    method: Callable[..., Any], kind: str, wrong: Callable[[], bool], differs: Callable[[], None]
) -> Callable[..., Any]:
    """Return the method, which does something else when `wrong` says so, and calls `differs` then."""
    given: list[Any] = []
    held: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def different(*arguments: Any, **named: Any) -> Any:
        if not wrong():
            given[:] = [method(*arguments, **named)]
            return given[0]
        before = given[0] if given else None
        altered = [_altered(each, kind) for each in arguments]
        same = kind not in ("skip", "repeat", "delay") and all(
            new is old for new, old in zip(altered, arguments, strict=True)
        )
        match kind:
            case "skip":
                returned = before
            case "repeat":
                method(*arguments, **named)
                returned = method(*arguments, **named)
            case "delay":
                held.append((arguments, named))
                late = held.pop(0) if len(held) > 1 else None
                returned = before if late is None else method(*late[0], **late[1])
            case "stale":
                given[:] = [method(*arguments, **named)]
                returned = given[0] if before is None else before
                same = returned is given[0]
            case _:
                now = method(*altered, **named)
                returned = _altered(now, kind) if same else now
                same = same and returned is now
        if not same:
            differs()
        return returned

    return different


def _altered(value: Any, kind: str) -> Any:
    """Return a list without its first element, or with its first two swapped. All else stays as it is."""
    is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    if kind not in ("drop", "swap") or not is_list or len(value) < 2:
        return value
    first, second, *others = value
    return type(value)((second, *others) if kind == "drop" else (second, first, *others))
