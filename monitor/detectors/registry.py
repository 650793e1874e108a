"""The detectors there are, and all that is derived from them: catalogue, thresholds, and cause and effect.

kvscope's own are the Detector subclasses that have a code, in the modules of this package: a new module is found by
itself. Detectors of other distributions come by entry point. CATALOGUE, THRESHOLDS and EFFECTS hold kvscope's own, the
same wherever they are read. `catalogue()`, `thresholds()` and `effects()` have the plug-ins' too.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, Final

import kvscope.monitor.detectors
from kvscope.monitor.detectors.detector import CanCause, Detector, Signal, signals_of
from kvscope.monitor.detectors.harm import graded
from kvscope.monitor.detectors.judgement import Judgement, Severity, TextJudgement
from kvscope.monitor.detectors.plugin_detectors import PluginDetectors
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.detectors.written import judge_text
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.runbook_files import runbook_text

Tie = Callable[[Any, Any], bool]
"""Decides for a cause and an effect in one engine whether the one may be the other's."""


def _discovered() -> Iterator[Detector[Any]]:
    package = kvscope.monitor.detectors
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        for value in list(vars(module).values()):
            if (
                isinstance(value, type)
                and issubclass(value, Detector)
                and value.code
                and value.__module__ == found.name
            ):
                yield value()


def _by_target(effects: Iterable[CanCause]) -> dict[str, Tie]:
    return {each.effect.code: each.tie for each in effects}


DETECTORS: Final = tuple(sorted(_discovered(), key=lambda detector: (detector.position, detector.code)))
"""kvscope's own, in the order in which they detect."""
CATALOGUE: Final[Mapping[str, type[Detector[Any]]]] = {detector.code: type(detector) for detector in DETECTORS}
THRESHOLDS: Final[Mapping[str, Threshold]] = {
    threshold.name: threshold for detector in DETECTORS for threshold in detector.thresholds.values()
}
EFFECTS: Final[Mapping[str, Mapping[str, Tie]]] = {
    detector.code: ties for detector in DETECTORS if (ties := _by_target(detector.causes().effects))
}
"""By the code of a cause, the codes that may be its effects, each with what ties them."""

PLUGINS: Final = PluginDetectors({code.partition(".")[0] for code in CATALOGUE})


@cache
def catalogue() -> Mapping[str, type[Detector[Any]]]:
    """Return every code, those of plug-ins after kvscope's own."""
    return {**CATALOGUE, **{each.detector.code: type(each.detector) for each in PLUGINS.accepted()}}


@cache
def severities() -> Mapping[str, Severity]:
    """Return the severity of each code at its full harm."""
    return {code: entry.severity for code, entry in catalogue().items()}


@cache
def thresholds() -> Mapping[str, Threshold]:
    """Return every threshold by its full name."""
    added = (threshold for each in PLUGINS.accepted() for threshold in each.detector.thresholds.values())
    return {**THRESHOLDS, **{threshold.name: threshold for threshold in added}}


@cache
def effects() -> Mapping[str, Mapping[str, Tie]]:
    """Return what may be the effect of what."""
    added = {
        each.detector.code: {code: PLUGINS.tie(each, tie) for code, tie in _by_target(each.effects).items()}
        for each in PLUGINS.accepted()
    }
    return {**EFFECTS, **added}


def runbook_of(code: str) -> str | None:
    """Return the runbook of a code as Markdown, of kvscope's own or of a plug-in's, or None if there is none."""
    plugged_in = (each.runbook for each in PLUGINS.accepted() if each.detector.code == code)
    return next(plugged_in, None) or runbook_text(code)


def explains(cause: Judgement, effect: Judgement) -> bool:
    """Return whether `effect` is what `cause` causes. A cause with the verdict cannot-tell explains nothing."""
    tie = effects().get(cause.code, {}).get(effect.code)
    if tie is None or cause.engine != effect.engine or cause.verdict == "cannot-tell":
        return False
    if isinstance(cause, TextJudgement) or isinstance(effect, TextJudgement):
        return False  # a line has none of the measurements that tie them
    return tie(cause, effect)


def detectors_for(ledger: EngineLedger) -> tuple[Detector[Any], ...]:
    """Return kvscope's own detectors that have a signal of the engine to work with."""
    return _with_a_signal(signals_of(ledger))


@cache
def _with_a_signal(signals: frozenset[Signal]) -> tuple[Detector[Any], ...]:
    return tuple(detector for detector in DETECTORS if not signals.isdisjoint(detector.requires))


def judge_engine(
    ledger: EngineLedger, settings: Settings, siblings: Sequence[EngineLedger] = ()
) -> Iterator[Judgement]:
    """Yield what every detector finds in the engine now. siblings: the other ranks of its server."""
    judgements: list[Judgement] = []
    for detector in detectors_for(ledger):
        judgements += detector.detect_rank(ledger, siblings, settings)
    judgements += judge_beside(ledger, judgements, settings)
    yield from graded(ledger, [*judgements, *PLUGINS.judge(ledger, siblings, settings)], severities())


def judge_beside(ledger: EngineLedger, judgements: Iterable[Judgement], settings: Settings) -> Iterator[Judgement]:
    """Yield what the text of a log or a report shows beside what the detectors have found in the engine."""
    known = {judged.code: judged.verdict for judged in judgements if not judged.pending}
    yield from judge_text(ledger, known, CATALOGUE, settings)


def parse_settings(texts: Iterable[str]) -> Settings:
    """Return the settings of `CODE.NAME=VALUE`, as `--set` takes it. Raises ValueError, naming what is wrong."""
    changed: dict[str, float] = {}
    known = thresholds()
    for text in texts:
        name, _, value = text.partition("=")
        if name not in known:
            near = [other for other in known if other.split(".")[:2] == name.split(".")[:2]]
            near = near or get_close_matches(name, known, cutoff=0)
            raise ValueError(
                f"--set {text}: there is no threshold {name!r}; near it are {', '.join(near)}, and"
                " docs/reference.md has all of them"
            )
        try:
            changed[name] = float(value)
        except ValueError:
            changed[name] = math.nan
        if math.isnan(changed[name]):
            raise ValueError(f"--set {text}: {value!r} is not a number")
    return Settings(changed)
