"""Plug-ins of other distributions: found by entry point, loaded once, contained when they fail.

A distribution adds to kvscope by entry points in one of GROUPS. Each group has one registry that calls `load(group)`,
checks what it gets, and calls `report_failure` when a plug-in is refused, raises or hangs. `loaded()` lists every
plug-in with its status, failures included, and `failures()` is what the pipeline turns into blind.plugin-failed
findings. This module knows nothing about detectors, sources or receivers.

A plug-in runs in the process of kvscope with its rights: install only what you trust. Containment covers mistakes.
`call_within` bounds a call by time: it runs on a daemon thread, and one that does not return is left behind there. Code
that never releases the GIL cannot be bounded this way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Literal, TypeVar

import msgspec

from .text import timestamp

DETECTOR_GROUP: Final = "kvscope.detectors"
SOURCE_GROUP: Final = "kvscope.sources"
RECEIVER_GROUP: Final = "kvscope.receivers"
GROUPS: Final = (DETECTOR_GROUP, SOURCE_GROUP, RECEIVER_GROUP)

LOAD_DEADLINE_S: Final = 10.0
"""How long the import of one plug-in may take. Heavy packages need seconds on a busy machine."""

T = TypeVar("T")
PluginState = Literal["loaded", "failed"]


@dataclass(frozen=True)
class Plugin:
    """One entry point of an installed distribution. `target` is the object that it names."""

    group: str
    name: str
    distribution: str
    version: str
    target: Any = field(default=None, repr=False, compare=False)


class PluginStatus(msgspec.Struct, frozen=True):
    """A plug-in as `monitor plugins` lists it. `error` is empty while nothing failed. `since` is RFC 3339: when it was
    loaded, or when it first failed.
    """

    group: str
    name: str
    distribution: str
    version: str
    status: PluginState
    error: str
    since: str


@dataclass(frozen=True)
class PluginFailure:
    """A failure of a plug-in. Times are wall ns. `disabled`: kvscope does not call it again."""

    plugin: Plugin
    error: str
    since_ns: int
    last_ns: int
    times: int
    disabled: bool


class PluginTimeout(Exception):
    """A plug-in's code did not return within its bound."""


class PluginRegistry:
    """The plug-ins of one process. Every method may be called from any thread."""

    def __init__(self, find: Callable[[str], list[EntryPoint]] | None = None) -> None:
        self._find = find or (lambda group: list(entry_points(group=group)))
        self._lock = threading.Lock()
        self._loading = threading.Lock()  # one import at a time: two threads that ask get the same plug-ins
        self._groups: dict[str, list[Plugin]] = {}
        self._loaded_ns: dict[Plugin, int] = {}
        self._failures: dict[Plugin, PluginFailure] = {}

    def load(self, group: str) -> list[Plugin]:
        """Load the group's plug-ins on the first call. Return those that loaded, by name. Never raises."""
        with self._loading:
            if group not in self._groups:
                self._groups[group] = self._load(group)
            return list(self._groups[group])

    def _load(self, group: str) -> list[Plugin]:
        plugins = []
        for entry in sorted(self._find(group), key=lambda entry: (entry.name, entry.value)):
            plugin = _described(entry)
            with self._lock:
                self._loaded_ns[plugin] = time.time_ns()
            try:
                target = call_within(LOAD_DEADLINE_S, entry.load)
            except Exception as error:
                self.report_failure(plugin, error, disable=True)
                continue
            plugins.append(Plugin(plugin.group, plugin.name, plugin.distribution, plugin.version, target))
        return plugins

    def report_failure(self, plugin: Plugin, error: BaseException | str, *, disable: bool = False) -> None:
        """Record that a plug-in was refused, raised or hung. With `disable` its caller does not call it again."""
        text = error if isinstance(error, str) else error_text(error)
        now_ns = time.time_ns()
        with self._lock:
            before = self._failures.get(plugin)
            self._failures[plugin] = PluginFailure(
                plugin,
                text,
                before.since_ns if before else now_ns,
                now_ns,
                before.times + 1 if before else 1,
                disable or (before is not None and before.disabled),
            )

    def is_disabled(self, plugin: Plugin) -> bool:
        """Return whether a failure was reported after which kvscope does not call the plug-in again."""
        with self._lock:
            failure = self._failures.get(plugin)
            return failure is not None and failure.disabled

    def failures(self) -> list[PluginFailure]:
        """Return the failures so far, one for each plug-in that failed, the first one first."""
        with self._lock:
            return sorted(self._failures.values(), key=lambda failure: failure.since_ns)

    def loaded(self) -> list[PluginStatus]:
        """List the plug-ins of the groups loaded so far, failed ones included."""
        with self._lock:
            return [_status(plugin, since, self._failures.get(plugin)) for plugin, since in self._loaded_ns.items()]


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of `call`, or raise its error. Raise PluginTimeout where it takes longer than `seconds`.

    SystemExit and KeyboardInterrupt raised by `call` arrive as RuntimeError: a plug-in does not end the process.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)
        except BaseException as error:
            errors.append(RuntimeError(error_text(error)))

    thread = threading.Thread(target=run, name="kvscope-plugin", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise PluginTimeout(f"did not return within {seconds:g} s")
    return results[0]


def error_text(error: BaseException) -> str:
    """Name an exception's type and message on one line of at most 300 characters."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"[:300] if message else type(error).__name__


def _described(entry: EntryPoint) -> Plugin:
    distribution = entry.dist
    return Plugin(
        entry.group,
        entry.name,
        distribution.name if distribution is not None else "",
        distribution.version if distribution is not None else "",
    )


def _status(plugin: Plugin, loaded_ns: int, failure: PluginFailure | None) -> PluginStatus:
    return PluginStatus(
        plugin.group,
        plugin.name,
        plugin.distribution,
        plugin.version,
        "failed" if failure else "loaded",
        failure.error if failure else "",
        timestamp(failure.since_ns if failure else loaded_ns) or "",
    )


INSTALLED: Final = PluginRegistry()
"""The plug-ins of this process's environment."""
load = INSTALLED.load
report_failure = INSTALLED.report_failure
is_disabled = INSTALLED.is_disabled
failures = INSTALLED.failures
loaded = INSTALLED.loaded
