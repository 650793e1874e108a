"""The detectors there are, and all that is derived from them: catalogue, thresholds, and cause and effect.

kvscope's own are the Detector subclasses that have a code, in the modules of this package: a new module is found by
itself. The class that names a code is its entry in the catalogue. Its subclasses find the same from other sources.
CATALOGUE, THRESHOLDS and EFFECTS hold kvscope's own, the same wherever they are read. `catalogue()`, `thresholds()` and
`effects()` have the plug-ins' too.

Detectors of other distributions come by entry point, are checked when they load, and run apart from the judging path.
An entry point of the group `kvscope.detectors` names a subclass of Detector. Its code carries the vendor's prefix
(`acme.slow-nic`), and it brings its runbook. One that is not as it should be is refused. One that raises is reported
and called again at the next judgement. One that does not return within DETECT_DEADLINE_S is not called again. Either is
named in a blind.plugin-failed finding, and changes nothing that kvscope's own detectors find.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ..base import plugins
from ..base.plugins import Plugin, PluginRegistry, PluginTimeout, call_within
from ..ledger.engine_ledger import EngineLedger
from .advice import metrics_dialect
from .detector import SIGNALS, CanCause, Detector, Known, Settings, Signal, Threshold, known_of
from .dialects import in_sglang
from .harm.unclaimed_harm import HarmDetector
from .judgement import SEVERITIES, HoldsBlocks, Judgement, TextJudgement
from .measured_harm import verdict_of
from .runbook_files import runbook_text
from .written import judge_text

DETECT_DEADLINE_S: Final = 2.0
"""How long a plug-in's detector may take for one engine. The judging path waits for it once: see above."""
_CODE: Final = re.compile(r"[a-z0-9][a-z0-9-]*\.[a-z0-9][a-z0-9.-]*")


class PluginDetector(NamedTuple):
    """A detector of a plug-in that was accepted, its runbook, and the effects that it declares."""

    plugin: Plugin
    detector: Detector[Any]
    runbook: str
    effects: tuple[CanCause, ...]


class PluginDetectors:
    """The detectors of the installed plug-ins. `families`: prefixes of kvscope's own codes, which are reserved."""

    def __init__(self, families: Collection[str], registry: PluginRegistry = plugins.INSTALLED) -> None:
        self._families = frozenset(families)
        self._registry = registry
        self._accepted: list[PluginDetector] | None = None

    def accepted(self) -> list[PluginDetector]:
        """Load and check them on the first call. Return the valid ones, by code."""
        if self._accepted is None:
            found: dict[str, PluginDetector] = {}
            for plugin in self._registry.load(plugins.DETECTOR_GROUP):
                try:
                    each = self._check(plugin, found)
                except Exception as error:
                    self._registry.report_failure(plugin, error, disable=True)
                else:
                    found[each.detector.code] = each
            self._accepted = [found[code] for code in sorted(found)]
        return self._accepted

    def _check(self, plugin: Plugin, taken: Collection[str]) -> PluginDetector:
        """Raise PluginRefused, naming what is wrong, or what the plug-in itself raises."""
        target = plugin.target
        if not (isinstance(target, type) and issubclass(target, Detector)):
            raise PluginRefused(f"{target!r} is not a subclass of kvscope.Detector")
        code, problem = target.code, ""
        family = code.partition(".")[0]
        if not _CODE.fullmatch(code):
            problem = "a code has the form vendor.name, of a-z, 0-9, - and ."
        elif family in self._families:
            problem = f"{family}.* is kvscope's own: a plug-in's code carries its vendor's prefix, such as acme.{code}"
        elif code in taken:
            problem = "another plug-in has this code"
        elif getattr(target, "severity", "") not in SEVERITIES[1:]:
            problem = f"severity is one of {', '.join(SEVERITIES[1:])}"
        elif not getattr(target, "title", ""):
            problem = "it has no title"
        elif not getattr(target, "requires", ()) or not set(target.requires) <= set(SIGNALS):
            problem = f"requires is one or more of {', '.join(SIGNALS)}"
        if problem:
            raise PluginRefused(f"detector {code!r}: {problem}")
        runbook = target.runbook if isinstance(target.runbook, str) else target.runbook.read_text(encoding="utf-8")
        if not runbook.strip():
            raise PluginRefused(f"detector {code!r}: it has no runbook")
        detector = target()
        return PluginDetector(plugin, detector, runbook, detector.causes.effects)

    def judge(self, ledger: EngineLedger, settings: Settings) -> list[Judgement]:
        """Return what the plug-ins find in the engine. Never raises."""
        found: list[Judgement] = []
        for each in self.accepted():
            if self._registry.is_disabled(each.plugin):
                continue
            try:
                found += call_within(DETECT_DEADLINE_S, _call(each.detector, ledger, settings))
            except PluginTimeout as error:
                self._registry.report_failure(each.plugin, error, disable=True)
            except Exception as error:
                self._registry.report_failure(each.plugin, error)
        return found

    def tie(self, each: PluginDetector, tie: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        """Return the tie of a plug-in, contained: one that raises ties nothing."""

        def contained(cause: Judgement, effect: Judgement) -> bool:
            try:
                return bool(tie(cause, effect))
            except Exception as error:
                self._registry.report_failure(each.plugin, error)
                return False

        return contained


class PluginRefused(Exception):
    """A plug-in is not as it should be."""


def _call(detector: Detector[Any], ledger: EngineLedger, settings: Settings) -> Callable[[], list[Judgement]]:
    return lambda: [_checked(detector, ledger, item) for item in detector.detect(ledger, settings)]


def _checked(detector: Detector[Any], ledger: EngineLedger, item: object) -> Judgement:
    """Return a judgement with every field of its type. Raise where it is none of this detector and engine."""
    if not isinstance(item, Judgement):
        raise TypeError(f"{detector.code} yielded {item!r}, which is no Judgement")
    if item.code != detector.code or item.engine != ledger.engine:
        raise ValueError(f"{detector.code} of {ledger.engine} yielded {item.code} of {item.engine}")
    return msgspec.convert(msgspec.to_builtins(item), type(item))


Tie = Callable[[Any, Any], bool]
"""Decides for a cause and an effect in one engine whether the one may be the other's."""
Contain = Callable[..., None]
"""Makes a call, which the text before it names, with the arguments after it."""


def _discovered() -> Iterator[Detector[Any]]:
    for found in pkgutil.walk_packages([str(Path(__file__).parent)], f"{__package__}."):
        if found.name.rpartition(".")[0] == __package__:
            continue  # codes are in the packages of their families
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


FAMILIES: Final = ("leak", "stuck", "thrash", "collapse", "imbalance", "corrupt", "sizing", "held", "blind", "harm")


def _in_order(detectors: Sequence[Detector[Any]]) -> Iterator[Detector[Any]]:
    """Yield them by family, causes before their effects."""
    causes: dict[str, set[str]] = {}
    for detector in detectors:
        for each in detector.causes.effects:
            causes.setdefault(each.effect.code, set()).add(detector.code)

    def depth(code: str) -> int:
        return 1 + max(map(depth, causes.get(code, ())), default=0)

    yield from sorted(
        detectors, key=lambda one: (FAMILIES.index(one.code.partition(".")[0]), depth(one.code), one.code)
    )


DETECTORS: Final = tuple(_in_order(list(_discovered())))
"""kvscope's own, in the order in which they detect."""
CATALOGUE: Final[Mapping[str, type[Detector[Any]]]] = {
    detector.code: type(detector) for detector in DETECTORS if "code" in vars(type(detector))
}
THRESHOLDS: Final[Mapping[str, Threshold]] = {
    threshold.name: threshold for detector in DETECTORS for threshold in detector.thresholds.values()
}
EFFECTS: Final[Mapping[str, Mapping[str, Tie]]] = {
    detector.code: ties for detector in DETECTORS if (ties := _by_target(detector.causes.effects))
}
"""By the code of a cause, the codes that may be its effects, each with what ties them."""
PLUGINS: Final = PluginDetectors({code.partition(".")[0] for code in CATALOGUE})


@cache
def catalogue() -> Mapping[str, type[Detector[Any]]]:
    """Return every code, those of plug-ins after kvscope's own."""
    return {**CATALOGUE, **{each.detector.code: type(each.detector) for each in PLUGINS.accepted()}}


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


def sources_of(code: str) -> frozenset[Signal]:
    """Return the signals from which one of kvscope's own codes can be found."""
    return frozenset(signal for detector in DETECTORS if detector.code == code for signal in detector.requires)


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
    return _detectors_for(known_of(ledger))


@cache
def _detectors_for(known: Known) -> tuple[Detector[Any], ...]:
    return tuple(detector for detector in DETECTORS if detector.applies(known))


def judge_engine(
    ledger: EngineLedger,
    settings: Settings,
    contain: Contain = lambda _what, judge, *arguments: judge(*arguments),
) -> list[Judgement]:
    """Return what every detector finds in the engine now. `contain` makes each call and decides what becomes of an
    exception: what was found before it stays.
    """
    judgements: list[Judgement] = []
    causes: list[Judgement] = []

    def graded(judged: Judgement) -> Judgement:
        """Return what a text shows with its severity: it measures no harm, and excludes no alternative."""
        is_text = isinstance(judged, TextJudgement)
        return verdict_of(ledger, judged, CATALOGUE[judged.code].severity, ()) if is_text else judged

    def judge_by(detector: Detector[Any]) -> None:
        if isinstance(detector, HarmDetector):
            judgements.extend(detector.detect_unclaimed(ledger, settings, causes))
            return
        for judged in map(graded, detector.detect(ledger, settings)):
            judgements.append(judged)
            if isinstance(judged, HoldsBlocks) or (judged.severity or detector.severity) != "info":
                causes.append(judged)

    def judge_by_text() -> None:
        known = {judged.code: judged.verdict for judged in judgements if not judged.pending}
        judgements.extend(map(graded, judge_text(ledger, known, CATALOGUE, settings)))

    for detector in detectors_for(ledger):
        contain(f"the detector {detector.code}", judge_by, detector)
    contain("what a text shows", judge_by_text)
    if metrics_dialect(ledger) == "sglang":
        judgements = list(map(in_sglang, judgements))
    return [*judgements, *PLUGINS.judge(ledger, settings)]


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
                " docs/reference/thresholds.md has all of them"
            )
        try:
            changed[name] = float(value)
        except ValueError:
            changed[name] = math.nan
        if math.isnan(changed[name]):
            raise ValueError(f"--set {text}: {value!r} is not a number")
    return Settings(changed)
