"""A guarded wrapper around one method of one object: chained with whatever else wraps it, and without danger to it.

The wrapper stands in the object's class and looks whose call it is. In the object itself it would cost more: Python
reads the attributes of an object slower once something was put into it from outside, and vLLM reads thousands a step.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("vllm.kvscope")

Before = Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]
"""Called with the method's arguments; may return others for it, by place and by name."""
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
        kind = next((one for one in type(owner).__mro__ if name in vars(one)), None)
        if kind is None:
            return False
        method = vars(kind)[name]
        missed = self._missed
        broken = False

        def fail() -> None:
            nonlocal broken
            broken = True
            self.errors += 1
            missed()
            logger.exception("kvscope: the hook on %s.%s is off after an error in it", kind.__name__, name)

        @functools.wraps(method)
        def hooked(self: object, *args: Any, **kwargs: Any) -> Any:
            if self is not owner:
                return method(self, *args, **kwargs)
            if broken:
                missed()
                return method(self, *args, **kwargs)
            if before is not None:
                try:
                    args, kwargs = before(*args, **kwargs) or (args, kwargs)
                except Exception:
                    fail()
            result = method(self, *args, **kwargs)
            if after is not None and not broken:
                try:
                    after(result, *args, **kwargs)
                except Exception:
                    fail()
            return result

        setattr(kind, name, hooked)
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
