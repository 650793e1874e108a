"""One registry of sources: what a target may look like, and the source that reads it.

A plug-in adds a source for a URL scheme by an entry point in the group `kvscope.sources`: its name is the scheme, its
object is called with the target and the SourceOptions and returns a Source. Built-in schemes cannot be replaced. A
plug-in's source is contained: GuardedSource calls it on a thread of its own, and what it raises ends only its reading.
"""

from __future__ import annotations

import contextlib
import queue
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ..base import plugins
from ..base.errors import BadTarget
from ..base.supervision import SupervisedThread, Supervisor
from ..contract.samples import Record
from .kv_event_stream import KvEventSource, discover_kv_endpoints
from .live_stream import DetectedStream
from .log_file import GZIP, GrowingLog, LogTexts
from .prometheus_history import PrometheusHistory
from .recording import Bundle, Recording
from .source import POLL_WAIT_S, Source, SourceOptions, SourceStatus
from .support_bundle import ZIP
from .targets import PROMETHEUS_PREFIX, STANDARD_INPUT, TargetKind, folder_inputs, kind_of, standard_input, zip_inputs

PLUGIN_HANG_S: Final = 10.0
"""A call of a plug-in that takes longer is reported as hanging."""
PLUGIN_RETRY_S: Final = 1.0
"""The pause after a call that raised."""
MAX_QUEUED: Final = 100
"""Polls whose records wait for the reader. After them the plug-in waits."""
PLUGIN_CLOSE_S: Final = 2.0


class GuardedSource(Source):
    """The source that `plugin` makes of `target`, made, opened and polled on the plug-in's thread."""

    def __init__(
        self,
        plugin: plugins.Plugin,
        target: str,
        options: SourceOptions,
        hang_s: float = PLUGIN_HANG_S,
        retry_s: float = PLUGIN_RETRY_S,
    ) -> None:
        self._plugin = plugin
        self._target = target
        self._hang_s = hang_s
        self._retry_s = retry_s
        self._queue: queue.Queue[Sequence[Record]] = queue.Queue(MAX_QUEUED)
        self._error = ""
        self._call = ""
        self._call_began_s = 0.0
        self._hang_reported = False
        self._records = 0
        self._engines: dict[str, None] = {}
        self._reported = SourceStatus(target=target, kind=plugin.name)
        self._ended = False
        self._options = options
        self._source: Source | None = None
        self.has_past = bool(getattr(plugin.target, "has_past", False))
        self.has_events = bool(getattr(plugin.target, "has_events", False))
        self.grows = bool(getattr(plugin.target, "grows", True))
        self._thread = SupervisedThread(
            f"plug-in {plugin.name}", "reader", self._turn, Supervisor(), within_s=hang_s, ending=self._close_plugin
        )

    def open(self) -> None:
        """Begin to read."""
        if not self._thread.was_started:
            self._thread.start()

    def poll(self, timeout_s: float = POLL_WAIT_S) -> Sequence[Record]:
        """Return the records of one poll of the plug-in, if there are any within the time."""
        self._thread.check()
        try:
            records = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            self._report_hang()
            return []
        self._records += len(records)
        self._engines |= dict.fromkeys(record.engine for record in records)
        return records

    def status(self) -> SourceStatus:
        """Report what the plug-in reports, and what is wrong with the plug-in itself."""
        hangs_s = self._hangs_s()
        error = self._error
        if hangs_s:
            error = f"the plug-in {self._plugin.distribution} has not returned from {self._call} for {hangs_s:.0f} s"
        reported = self._reported
        return msgspec.structs.replace(
            reported,
            target=self._target,
            kind=self._plugin.name,
            engines=tuple(dict.fromkeys((*reported.engines, *self._engines))),
            in_step=not error and (reported.in_step or self._records > 0),
            ended=self._ended and self._queue.empty(),
            error=error or reported.error,
        )

    def close(self) -> None:
        """Stop the plug-in. One that hangs is left behind."""
        self._thread.ask_to_stop()
        while not self._queue.empty():  # a put that waits goes on
            self._queue.get_nowait()
        self._thread.stop(PLUGIN_CLOSE_S)

    # ---------------------------------------------------------------- the plug-in's thread

    def _turn(self) -> float | None:
        try:
            records = self._poll_plugin()
            self._error = ""
        except BaseException as error:  # a plug-in that calls sys.exit ends nothing
            self._error = f"the plug-in {self._plugin.distribution} failed: {plugins.error_text(error)}"
            plugins.report_failure(self._plugin, error)
            self._begin("")
            return self._retry_s
        self._begin("")
        self._hand_over(records)
        return None if self._ended else 0.0

    def _close_plugin(self) -> None:
        if self._source is not None:
            self._begin("close")
            try:
                self._source.close()
            except Exception as error:
                plugins.report_failure(self._plugin, error)
        self._begin("")

    def _poll_plugin(self) -> list[Record]:
        if self._source is None:
            self._begin(self._plugin.name)
            source: Source = self._plugin.target(self._target, self._options)
            self._begin("open")
            source.open()
            self._source = source
        self._begin("poll")
        records = list(self._source.poll(POLL_WAIT_S))
        for record in records:
            if not isinstance(record, Record):
                raise TypeError(f"poll returned a {type(record).__name__}, which is not a record")
        self._begin("status")
        reported = self._source.status()
        if not isinstance(reported, SourceStatus):
            raise TypeError(f"status returned a {type(reported).__name__} instead of a SourceStatus")
        self._reported, self._ended = reported, reported.ended
        return records

    def _hand_over(self, records: Sequence[Record]) -> None:
        waits = bool(records)
        while waits and not self._thread.is_stopping:
            with contextlib.suppress(queue.Full):
                self._queue.put(records, timeout=POLL_WAIT_S)
                waits = False

    def _begin(self, call: str) -> None:
        self._call, self._call_began_s = call, time.monotonic()
        self._hang_reported = False

    def _hangs_s(self) -> float:
        seconds = time.monotonic() - self._call_began_s
        return seconds if self._call and seconds > self._hang_s else 0.0

    def _report_hang(self) -> None:
        if self._hangs_s() and not self._hang_reported:
            self._hang_reported = True
            plugins.report_failure(self._plugin, f"has not returned from {self._call} for {self._hang_s:g} s")


SourceFactory = Callable[[str, SourceOptions], Source]
SCHEME: Final = re.compile(r"([a-z][a-z0-9.-]*)(?:\+[a-z]+)?://")
BUILT_IN_SCHEMES: Final = frozenset({"tcp", "ipc", "http", "https", "prometheus"})


class SourceType(NamedTuple):
    """A kind of target: what it looks like, what it is in words, and what reads it."""

    form: str
    description: str
    make: SourceFactory


def _metrics_page(target: str, options: SourceOptions) -> Source:
    from .metrics_page import EVERY_S, MetricsPage

    return MetricsPage(target, options.timeout_s, every_s=options.interval_s or EVERY_S)


def _log_source(target: str, options: SourceOptions) -> Source:
    path = Path(target)
    if target == STANDARD_INPUT:
        return LogTexts(target, lambda: [standard_input()])
    if path.is_dir():
        return LogTexts(target, lambda: folder_inputs(path))
    with path.open("rb") as file:
        head = file.read(len(ZIP))
    if head == ZIP:
        return LogTexts(target, lambda: zip_inputs(path))
    grows = not head.startswith(GZIP)
    if options.follow and grows:
        return GrowingLog(path, options.look_back_s)
    return LogTexts(str(path), lambda: [path], options.look_back_s if options.follow else None, grows=grows)


def _no_source(target: str, _options: SourceOptions) -> Source:
    raise BadTarget(
        f"{target} is the address of a kvscope service, which cannot be read as a source: name what it reads (its page"
        f" Sources lists it), {target.rstrip('/')}/metrics for an engine's metrics page, or {PROMETHEUS_PREFIX}{target}"
        " for a Prometheus server"
    )


SOURCE_TYPES: Final[dict[TargetKind, SourceType]] = {
    TargetKind.STREAM: SourceType(
        "tcp://HOST:PORT, ipc://PATH", "an engine's event stream, or vLLM's KV events", DetectedStream
    ),
    TargetKind.KV_EVENTS: SourceType(
        "http(s)://…/kv_event_sources",
        "a vLLM that names the address of its KV events",
        lambda target, options: KvEventSource(target, lambda: discover_kv_endpoints(target, options.timeout_s)),
    ),
    TargetKind.METRICS: SourceType(
        "http(s)://HOST:PORT/metrics", "an engine's metrics page, vLLM's, SGLang's or kvscope's own", _metrics_page
    ),
    TargetKind.PROMETHEUS: SourceType(
        "prometheus+http(s)://…",
        "what a Prometheus server stored about engines",
        lambda target, options: PrometheusHistory(target.removeprefix(PROMETHEUS_PREFIX), options),
    ),
    TargetKind.SERVICE: SourceType(
        "http(s)://HOST:PORT", "a kvscope service (the default: KVSCOPE_URL, else http://127.0.0.1:8765)", _no_source
    ),
    TargetKind.RECORDING: SourceType(
        "DIRECTORY", "a recording", lambda target, options: Recording(Path(target), options.engine)
    ),
    TargetKind.LOG: SourceType(
        "FILE, -",
        "an engine's log (plain or gzip), a report in prose, a directory or zip of them, a segment of a recording,"
        " a support bundle, or - for standard input",
        _log_source,
    ),
    TargetKind.BUNDLE: SourceType("", "", lambda target, options: Bundle(Path(target), options)),
}


def is_service(target: str) -> bool:
    """Return whether `target` is a kvscope service, which is queried and not read. Raises BadTarget."""
    return _plugin_for(target) is None and kind_of(target) is TargetKind.SERVICE


def is_recording(target: str) -> bool:
    """Return whether `target` is a recording. Raises BadTarget."""
    return _plugin_for(target) is None and kind_of(target) is TargetKind.RECORDING


def open_source(target: str, options: SourceOptions | None = None, kind: TargetKind | None = None) -> Source:
    """Return the source that reads `target`, by its scheme or content, or as the `kind` that is given.

    The source is not connected yet. Raises BadTarget for a target that no source reads, and SourceError or
    ContractError for one that cannot be read.
    """
    options = options or SourceOptions()
    plugin = _plugin_for(target) if kind is None else None
    if plugin is not None:
        return GuardedSource(plugin, target, options)
    return SOURCE_TYPES[kind or kind_of(target)].make(target, options)


def source_help() -> list[tuple[str, str]]:
    """Return the form and the description of every target, built-in and of plug-ins."""
    found = [(each.form, each.description) for each in SOURCE_TYPES.values() if each.form]
    return found + [(f"{each.name}://…", f"read by {each.distribution}") for each in source_plugins().values()]


def _plugin_for(target: str) -> plugins.Plugin | None:
    match = SCHEME.match(target)
    if match is None or match[1] in BUILT_IN_SCHEMES:
        return None
    found = source_plugins().get(match[1])
    if found is None:
        known = ", ".join(form for form, _ in source_help())
        raise BadTarget(f"{match[0]}: no source reads this scheme, and no plug-in adds it. A target is one of: {known}")
    return found


def source_plugins() -> dict[str, plugins.Plugin]:
    """Return the plug-ins by their scheme. One whose name is no scheme, or a built-in one, is refused and reported."""
    usable = {}
    for plugin in plugins.load(plugins.SOURCE_GROUP):
        if plugin.name in BUILT_IN_SCHEMES or not SCHEME.fullmatch(f"{plugin.name}://"):
            plugins.report_failure(
                plugin, f"{plugin.name!r} is a built-in scheme, or none: name the entry point acme", disable=True
            )
        elif not callable(plugin.target):
            plugins.report_failure(plugin, "its object is not callable with a target and SourceOptions", disable=True)
        else:
            usable[plugin.name] = plugin
    return usable
