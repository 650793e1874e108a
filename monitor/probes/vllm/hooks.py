"""A guarded wrapper around one method of one object: chained with whatever else wraps it, and without danger to it.

The wrapper stands in the object's class and looks whose call it is. In the object itself it would cost more: Python
reads the attributes of an object slower once something was put into it from outside, and vLLM reads thousands a step.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from inspect import Parameter
from types import FunctionType
from typing import Any, Final

logger = logging.getLogger("vllm.kvscope")

Before = Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]
"""Called with the method's arguments. It may return others for it, by place and by name."""
After = Callable[..., None]
"""Called with the method's result, and then those of its arguments that it names, or all if it takes any."""

TRACED_SOURCE: Final = """
def traced({takes}):
    kvscope_result = kvscope_method({hands})
    if {called} is kvscope_owner:
        try:
            kvscope_last(kvscope_result{handed})
        except Exception:
            kvscope_fail()
    return kvscope_result
"""
"""The wrapper of what is called at every step, with the parameters of the method itself: to collect any arguments and
to hand them on twice takes three times as long as all the rest of it. The names are such as no method has."""


class Hooks:
    """Hooks into one engine's objects. `missed` is called for each call that a broken hook did not see."""

    def __init__(self, missed: Callable[[], None]) -> None:
        self.errors = 0
        """How many hooks have failed. Each is off since."""
        self._missed = missed

    def wrap(self, owner: object, name: str, before: Before | None = None, after: After | None = None) -> bool:
        """Wrap the method `name` of this one object. Return False if it has none.

        An error of ours turns the hook off and is logged once. The method is called in every case.
        """
        kind = next((one for one in type(owner).__mro__ if name in vars(one)), None)
        if kind is None:
            return False
        method = vars(kind)[name]
        place = f"{kind.__name__}.{name}"
        if before is None and isinstance(method, FunctionType):
            wrapper = self._traced(place, method, owner, after or _nothing)
        else:
            wrapper = self._hooked(place, method, owner, before, after)
        setattr(kind, name, functools.wraps(method)(wrapper))
        return True

    def _hooked(
        self, place: str, method: Callable[..., Any], owner: object, before: Before | None, after: After | None
    ) -> Callable[..., Any]:
        first, last = before or _nothing, after or _nothing

        def missed(*_args: Any, **_kwargs: Any) -> None:
            self._missed()

        def fail() -> None:
            nonlocal first, last
            first, last = (missed, _nothing) if before else (_nothing, missed)
            self._failed(place)

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

        return hooked

    def _traced(self, place: str, method: FunctionType, owner: object, after: After) -> Callable[..., Any]:
        def missed(*_args: Any, **_kwargs: Any) -> None:
            self._missed()

        def fail() -> None:
            names["kvscope_last"] = missed
            self._failed(place)

        names: dict[str, Any] = {
            "kvscope_method": method,
            "kvscope_owner": owner,
            "kvscope_last": after,
            "kvscope_fail": fail,
        }
        exec(_traced_source(method, after), names)
        traced: FunctionType = names["traced"]
        traced.__defaults__, traced.__kwdefaults__ = method.__defaults__, method.__kwdefaults__
        return traced

    def _failed(self, place: str) -> None:
        self.errors += 1
        self._missed()
        logger.exception("kvscope: the hook on %s is off after an error in it", place)


def _traced_source(method: FunctionType, after: After) -> str:
    """Return the source HEARD for this method and the callback after it."""
    has = inspect.signature(method, follow_wrapped=False).parameters
    called, *arguments = has
    asked = list(inspect.signature(after).parameters.values())[1:]
    handed: list[str] = []
    for one in asked:
        if one.kind is Parameter.VAR_POSITIONAL:
            handed += [_handed(has[name]) for name in arguments if has[name].kind not in _BY_NAME]
        elif one.kind is Parameter.VAR_KEYWORD:
            handed += [_handed(has[name]) for name in arguments if has[name].kind in _BY_NAME]
        elif one.name in has:
            handed.append(one.name)
    # That there is a default must be written here; what it is, is set afterwards.
    bare = [
        one.replace(annotation=Parameter.empty, default=Parameter.empty if one.default is Parameter.empty else None)
        for one in has.values()
    ]
    return TRACED_SOURCE.format(
        takes=str(inspect.Signature(bare))[1:-1],
        hands=", ".join(map(_handed, has.values())),
        called=called,
        handed="".join(f", {argument}" for argument in handed),
    )


_BY_NAME: Final = (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)


def _handed(parameter: Parameter) -> str:
    """How it is handed on in a call."""
    name = parameter.name
    match parameter.kind:
        case Parameter.VAR_POSITIONAL:
            return f"*{name}"
        case Parameter.VAR_KEYWORD:
            return f"**{name}"
        case Parameter.KEYWORD_ONLY:
            return f"{name}={name}"
        case _:
            return name


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass
