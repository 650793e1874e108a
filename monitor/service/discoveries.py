"""Discoveries of a running service: their targets are added as they are found, and removed a while after they leave."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from ..base.supervision import SupervisedThread
from ..base.text import timestamp
from ..questions.pipeline import Pipeline
from ..questions.schema import DiscoveryView
from ..sources.discovery_config import DiscoveryConfig, FoundTargets
from ..sources.source import READ_ERRORS
from ..sources.targets import TargetKind
from .source_set import SharedEngines, SourceSet, WantedSource

logger = logging.getLogger(__name__)

TURN_WITHIN_S: Final = 90.0
"""For one list: several pages of 10 s each, and the readers that end."""
MAX_ERRORS: Final = 3
"""Bound of the errors shown."""


class Discovery:
    """One discovery: asks for its list over and over, and changes `sources` by it.

    engines_of: the engines that a source brought.
    """

    def __init__(
        self,
        config: DiscoveryConfig,
        sources: SourceSet | SharedEngines,
        engines_of: Callable[[WantedSource], Iterable[str]],
        watch: Pipeline,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._sources = sources
        self._engines_of = engines_of
        self._watch = watch
        self._monotonic_s = monotonic_s
        self._finder = config.finder()
        self._worker = f"the discovery {config.name}"
        self._missing_s: dict[WantedSource, float] = {}
        """Since when the list has a target no more."""
        self.view = DiscoveryView(name=config.name)
        """How it is."""
        self._thread = SupervisedThread(
            self._worker, "discovery", self._turn, watch.supervisor, within_s=TURN_WITHIN_S, ending=self._end
        )
        self.start = self._thread.start
        self.stop = self._thread.stop
        """Its targets are still read."""

    def _turn(self) -> float:
        self.look()
        return self.config.refresh_s

    def _end(self) -> None:
        self._watch.report_recovery(self._worker)
        self._finder.close()

    def look(self) -> None:
        """Ask for the list once. If the request fails, everything remains unchanged."""
        try:
            found = self._finder.find()
            errors = [*found.left_out, *self._apply(found)]
        except READ_ERRORS as error:
            self._report(str(error), is_blind=True)
        except Exception as error:
            logger.exception("%s failed", self._worker)
            self._report(f"{type(error).__name__}: {error}", is_blind=True)
        else:
            more = [f"and {len(errors) - MAX_ERRORS} more"] if len(errors) > MAX_ERRORS else []
            self._report("; ".join([*errors[:MAX_ERRORS], *more]), is_blind=False, listed=len(found.targets))

    def _apply(self, found: FoundTargets) -> list[str]:
        """Add new targets and remove those that have been gone for long. Return why targets cannot be read."""
        errors = []
        now_s = self._monotonic_s()
        listed = [
            WantedSource(each.target, TargetKind.STREAM if each.is_stream else TargetKind.METRICS)
            for each in found.targets
        ]
        for wanted in listed:
            try:
                self._sources.add(wanted, self.config.name)
            except READ_ERRORS as error:
                errors.append(str(error))
        missing = set(self._sources.wanted(self.config.name)).difference(listed)
        self._missing_s = {wanted: self._missing_s.get(wanted, now_s) for wanted in missing}
        leaving = [wanted for wanted, at_s in self._missing_s.items() if now_s - at_s >= self.config.gone_after_s]
        self._sources.remove(leaving, self.config.name)
        for wanted in leaving:
            del self._missing_s[wanted]
        return errors

    def _report(self, error: str, *, is_blind: bool, listed: int | None = None) -> None:
        self.view = DiscoveryView(
            name=self.config.name,
            targets=self.view.targets if listed is None else listed,
            leaving=len(self._missing_s),
            listed_at=self.view.listed_at if listed is None else timestamp(time.time_ns()),
            is_blind=is_blind,
            error=error,
        )
        if error:
            wanted = self._sources.wanted(self.config.name)
            engines = [engine for one in wanted for engine in self._engines_of(one)] or [self.config.name]
            self._watch.report_failure(self._worker, "discovery", error, engines)
        else:
            self._watch.report_recovery(self._worker)


class Discoveries:
    """The discoveries of a service. One thread changes them."""

    def __init__(
        self,
        sources: SourceSet | SharedEngines,
        engines_of: Callable[[WantedSource], Iterable[str]],
        watch: Pipeline,
        configs: Iterable[DiscoveryConfig],
    ) -> None:
        self._sources = sources
        self._engines_of = engines_of
        self._watch = watch
        self._running = [self._discovery_of(config) for config in configs]
        self._is_started = False

    def start(self) -> None:
        """Begin to look."""
        self._is_started = True
        for discovery in self._running:
            discovery.start()

    def replace(self, configs: Iterable[DiscoveryConfig]) -> None:
        """Look by these from now on. Targets of none of them leave at once: the change asked for that."""
        wanted = list(configs)
        names = {config.name for config in wanted}
        staying = [discovery for discovery in self._running if discovery.config in wanted]
        for discovery in self._running:
            if discovery not in staying:
                discovery.stop()
                if discovery.config.name not in names:
                    self._sources.remove(self._sources.wanted(discovery.config.name), discovery.config.name)
        known = [discovery.config for discovery in staying]
        new = [self._discovery_of(config) for config in wanted if config not in known]
        self._running = [*staying, *new]
        if self._is_started:
            for discovery in new:
                discovery.start()

    def _discovery_of(self, config: DiscoveryConfig) -> Discovery:
        return Discovery(config, self._sources, self._engines_of, self._watch)

    def views(self) -> list[DiscoveryView]:
        """Report how each is."""
        return [discovery.view for discovery in self._running]

    def stop(self) -> None:
        """End them, and wait until they have."""
        for discovery in self._running:
            discovery.stop()
