"""A guarded wrapper around one method of one object: chained with whatever else wraps it, and without danger to it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("vllm.kvscope")

Before = Callable[..., tuple[Any, ...] | None]
"""Called with the method's arguments; may return others for it."""
After = Callable[..., None]
"""Called with the method's result, and then its arguments."""


class Hooks:
    """Hooks into one engine's objects. `missed` is called for each call that a broken hook did not see."""

    def __init__(self, missed: Callable[[], None]) -> None:
        self.errors = 0
        """How many hooks have failed; each is off since."""
        self._missed = missed

    def wrap(self, owner: object, name: str, before: Before | None = None, after: After | None = None) -> bool:
        """Wrap the method `name` of this one object; False if it has none.

        An error of ours turns the hook off and is logged once; the method is called whatever happens.
        """
        if not callable(getattr(owner, name, None)):
            return False
        below = vars(owner).get(name)
        kind = type(owner)
        broken = False

        def fail() -> None:
            nonlocal broken
            broken = True
            self.errors += 1
            self._missed()
            logger.exception("kvscope: the hook on %s.%s is off after an error in it", kind.__name__, name)

        def hooked(*args: Any, **kwargs: Any) -> Any:
            # Looked up at each call, so that a plugin that wraps the class after us is not left out.
            method = getattr(kind, name).__get__(owner) if below is None else below
            if broken:
                self._missed()
                return method(*args, **kwargs)
            if before is not None:
                try:
                    args = before(*args, **kwargs) or args
                except Exception:
                    fail()
            result = method(*args, **kwargs)
            if after is not None and not broken:
                try:
                    after(result, *args, **kwargs)
                except Exception:
                    fail()
            return result

        setattr(owner, name, hooked)
        return True


def reader(method: Callable[..., Any], *names: str) -> Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]:
    """Finds these arguments in a call of a bound method, given by place or by name. Raises KeyError for one it lacks.

    Releases of vLLM differ in the order of arguments; the names last longer.
    """
    places = {name: place for place, name in enumerate(inspect.signature(method).parameters)}
    wanted = [(name, places[name]) for name in names]

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        return [kwargs[name] if name in kwargs else args[place] for name, place in wanted]

    return read
