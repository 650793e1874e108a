"""A mutant applied to the modules that a process has imported: a function gets the code of the mutated source."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from kvscope.monitor.detectors.detector import Threshold

from .mutant_sites import Mutant, mutated_tree


class NotApplied(Exception):
    """The object of a mutant cannot be replaced in a living process."""


def apply(mutant: Mutant) -> None:
    """Change the living module. Raises NotApplied."""
    if mutant.value is not None:
        threshold_of(mutant).value = mutant.value
        return
    function = function_of(mutant)
    source = function.__code__.co_filename
    code = compile(mutated_tree(Path(source), mutant.nth), source, "exec", dont_inherit=True)
    name = mutant.function.rpartition(".")[2]
    for found in _codes(code):
        if found.co_name == name and found.co_firstlineno == function.__code__.co_firstlineno:
            function.__code__ = found
            return
    raise NotApplied(mutant.function)


def function_of(mutant: Mutant) -> FunctionType:
    """Return the living function of a mutant. Raises NotApplied."""
    return _unwrapped(_object_of(mutant.module, mutant.function))


def threshold_of(mutant: Mutant) -> Threshold:
    """Return the living threshold of a mutant. Raises NotApplied."""
    found = _object_of(mutant.module, mutant.function)
    if not isinstance(found, Threshold):
        raise NotApplied(repr(found))
    return found


def _object_of(module: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:  # a part of the probe that needs vLLM
        raise NotApplied(module) from error
    for part in name.split("."):
        found = vars(found).get(part, None)
        if found is None:
            raise NotApplied(name)
    return found


def _unwrapped(found: Any) -> FunctionType:
    if isinstance(found, property) and found.fget is not None:
        found = found.fget
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if isinstance(found, functools.cached_property):
        found = found.func
    found = getattr(found, "__wrapped__", found)
    if not isinstance(found, FunctionType):
        raise NotApplied(repr(found))
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _codes(const)
