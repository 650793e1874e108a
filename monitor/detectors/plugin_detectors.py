"""Detectors of other distributions: checked when they load, and run apart from the judging path.

An entry point of the group `kvscope.detectors` names a subclass of Detector. Its code carries the vendor's prefix
(`acme.slow-nic`), and it brings its runbook. One that is not as it should be is refused. One that raises is reported
and called again at the next judgement. One that does not return within DETECT_DEADLINE_S is not called again. Either is
named in a blind.plugin-failed finding, and changes nothing that kvscope's own detectors find.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvscope.monitor import plugins
from kvscope.monitor.detectors.detector import SIGNALS, CanCause, Detector
from kvscope.monitor.detectors.judgement import SEVERITIES, Judgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.plugins import Plugin, PluginRegistry, PluginTimeout, call_within

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
        elif getattr(target, "severity", "") not in SEVERITIES:
            problem = f"severity is one of {', '.join(SEVERITIES)}"
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
        return PluginDetector(plugin, detector, runbook, detector.causes().effects)

    def judge(self, ledger: EngineLedger, siblings: Sequence[EngineLedger], settings: Settings) -> list[Judgement]:
        """Return what the plug-ins find in the engine. Never raises."""
        found: list[Judgement] = []
        for each in self.accepted():
            if self._registry.is_disabled(each.plugin):
                continue
            try:
                found += call_within(DETECT_DEADLINE_S, _call(each.detector, ledger, siblings, settings))
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


def _call(
    detector: Detector[Any], ledger: EngineLedger, siblings: Sequence[EngineLedger], settings: Settings
) -> Callable[[], list[Judgement]]:
    return lambda: [_checked(detector, ledger, item) for item in detector.detect_rank(ledger, siblings, settings)]


def _checked(detector: Detector[Any], ledger: EngineLedger, item: object) -> Judgement:
    """Return a judgement with every field of its type. Raise where it is none of this detector and engine."""
    if not isinstance(item, Judgement):
        raise TypeError(f"{detector.code} yielded {item!r}, which is no Judgement")
    if item.code != detector.code or item.engine != ledger.engine:
        raise ValueError(f"{detector.code} of {ledger.engine} yielded {item.code} of {item.engine}")
    return msgspec.convert(msgspec.to_builtins(item), type(item))
