"""One registry of sources: what a target may look like, and the source that reads it.

A plug-in adds a source for a URL scheme by an entry point in the group `kvscope.sources`: its name is the scheme, its
object is called with the target and the SourceOptions and returns a Source. Built-in schemes cannot be replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from kvscope.monitor import plugins
from kvscope.monitor.errors import BadTarget
from kvscope.monitor.sources.guarded_source import GuardedSource
from kvscope.monitor.sources.kv_event_stream import KvEventSource, discover_kv_endpoints
from kvscope.monitor.sources.live_stream import DetectedStream
from kvscope.monitor.sources.log_file import LogFile
from kvscope.monitor.sources.log_inputs import STANDARD_INPUT, folder_inputs, standard_input, zip_inputs
from kvscope.monitor.sources.log_texts import LogTexts
from kvscope.monitor.sources.prometheus_history import PrometheusHistory
from kvscope.monitor.sources.recording import Bundle, Recording
from kvscope.monitor.sources.source import Source, SourceError, SourceOptions
from kvscope.monitor.sources.support_bundle import ZIP
from kvscope.monitor.sources.targets import PROMETHEUS_PREFIX, TargetKind, kind_of

SourceFactory = Callable[[str, SourceOptions], Source]
SCHEME: Final = re.compile(r"([a-z][a-z0-9.-]*)(?:\+[a-z]+)?://")
BUILT_IN_SCHEMES: Final = frozenset({"tcp", "ipc", "http", "https", "prometheus"})


class SourceType(NamedTuple):
    """A kind of target: what it looks like, what it is in words, and what reads it."""

    form: str
    description: str
    make: SourceFactory


def _metrics_page(target: str, options: SourceOptions) -> Source:
    try:
        from kvscope.monitor.sources.metrics_page import EVERY_S, MetricsPage
    except ImportError as error:
        raise SourceError(
            f"{target}: a metrics page needs more than the base install: pip install 'kvscope[monitor]' ({error})"
        ) from error
    return MetricsPage(target, options.timeout_s, every_s=options.interval_s or EVERY_S)


def _kv_event_sources(target: str, options: SourceOptions) -> Source:
    return KvEventSource(target, lambda: discover_kv_endpoints(target, options.timeout_s))


def _log_source(target: str, options: SourceOptions) -> Source:
    path = Path(target)
    if target == STANDARD_INPUT:
        return LogTexts(target, lambda: [standard_input()])
    if path.is_dir():
        return LogTexts(target, lambda: folder_inputs(path))
    with path.open("rb") as file:
        is_zip = file.read(len(ZIP)) == ZIP
    return LogTexts(target, lambda: zip_inputs(path)) if is_zip else LogFile(path, options)


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
        "http(s)://…/kv_event_sources", "a vLLM that names the address of its KV events", _kv_event_sources
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
