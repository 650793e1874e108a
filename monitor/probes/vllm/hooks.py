"""A guarded wrapper around one method of one object: chained with whatever else wraps it, and without danger to it.

The wrapper stands in the object's class and looks whose call it is. In the object itself it would cost more: Python
reads the attributes of an object slower once something was put into it from outside, and vLLM reads thousands a step.
"""

from __future__ import annotations

import functools
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
        first, last = before or _nothing, after or _nothing

        def missed(*_args: Any, **_kwargs: Any) -> None:
            self._missed()

        def fail() -> None:
            nonlocal first, last
            first, last = (missed, _nothing) if before else (_nothing, missed)
            self.errors += 1
            self._missed()
            logger.exception("kvscope: the hook on %s.%s is off after an error in it", kind.__name__, name)

        def hooked(called: object, *args: Any, **kwargs: Any) -> Any:
            if called is not owner:
                return method(called, *args, **kwargs)
            try:
                args, kwargs = first(*args, **kwargs) or (args, kwargs)
            except Exception:
                fail()
            result = method(called, *args, **kwargs)
            try:
                last(result, *args, **kwargs)
            except Exception:
                fail()
            return result

        def heard(called: object, *args: Any, **kwargs: Any) -> Any:
            # What is called at every step: to hand on an empty mapping would cost as much as all the rest here.
            result = method(called, *args, **kwargs) if kwargs else method(called, *args)
            if called is owner:
                try:
                    last(result, *args, **kwargs) if kwargs else last(result, *args)
                except Exception:
                    fail()
            return result

        setattr(kind, name, functools.wraps(method)(hooked if before else heard))
        return True


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass
