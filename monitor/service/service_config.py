"""Makes the service's configuration of the settings in force, finds what the service could not run with, and prints
the settings as a configuration file would have them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from ..base.errors import BadTarget, CannotTell, ContractError
from ..base.http_url import http_url, shown
from ..base.text import install_hint
from ..detectors.registry import parse_settings
from ..fleet.bus_config import BusConfig, bus_config
from ..history.retention import Keep
from ..outputs.alerting.alerting import AlertsConfig
from ..outputs.alerting.receivers import BadReceiver, receiver_of
from ..outputs.otel.export_queue import BadEndpoint, exporters_for
from ..outputs.otel.otel_exporter import OtelConfig
from ..probes.publisher import EVENTS_ENDPOINT
from ..sources.discovery_config import DISCOVERIES
from ..sources.source import SourceOptions
from ..sources.source_registry import is_recording, open_source
from ..sources.targets import TargetKind
from .service import ServiceConfig
from .settings_file import Effective, Problem, settings_layers
from .settings_table import SETTINGS, THRESHOLDS_KEY, Setting, length, length_or_never
from .web_server import LoadedConfig, Mount, require_token, serve

LIVE: Final = ("targets", "events", "metrics", "alert", "otlp", "data")
"""Keys that make no sense beside a recording."""
KIND_OF: Final[dict[str, TargetKind | None]] = {
    "events": TargetKind.STREAM,
    "metrics": TargetKind.METRICS,
    "targets": None,
}


def loaded_config(effective: Effective) -> LoadedConfig:
    """Return the service's configuration, and the settings that only a restart changes. Raises BadConfiguration."""
    fixed = {key: effective[key] for key, setting in SETTINGS.items() if not setting.is_live}
    return LoadedConfig(service_config(effective), fixed)


def service_config(effective: Effective) -> ServiceConfig:
    """Return the service's configuration. Raises BadConfiguration with every problem that shows without connecting."""
    recordings, targets = _recordings_and_targets(effective)
    problems = [*_contradictions(effective, recordings, targets), *_bad_values(effective)]
    effective.refuse(problems)
    thresholds = parse_settings(effective[THRESHOLDS_KEY])
    shared = {key: effective[key] for key in ("host", "port", "token", "memory_budget")}
    if recordings:
        return ServiceConfig(recordings=recordings, settings=thresholds, **shared)
    data: Path | None = effective["data"]
    return ServiceConfig(
        events=_events(effective, targets),
        metrics=effective["metrics"],
        targets=targets,
        alerts=alerts_config(effective, data / "alerts.sqlite" if data is not None else None),
        otlp=OtelConfig(effective["otlp"], **_given(sample=effective["otlp_sample"])) if effective["otlp"] else None,
        settings=thresholds,
        data=data,
        keep=Keep(**_given(days=effective["keep_days"], bytes=effective["keep_bytes"])),
        discovery=effective.discovery,
        archive=effective["archive"],
        bus=_bus(effective),
        **shared,
        **_given(look_back_s=effective["look_back"]),
    )


def alerts_config(effective: Effective, path: Path | None = None) -> AlertsConfig:
    """Return the settings of alerts. `path`: the outbox's (None: in memory)."""
    return AlertsConfig(
        receivers=effective["alert"],
        secret=effective["webhook_secret"],
        allow_private=effective["alert_private"],
        repeat_s=float(effective["alert_repeat"]),
        least_verdict=effective["alert_verdict"],
        engines_only=effective["alert_engines_only"],
        path=path,
        page=http_url(effective["public_url"]) if effective["public_url"] else None,
    )


def refuse_what_cannot_run(effective: Effective) -> None:
    """Raise BadConfiguration with every problem that the service would meet as it starts: it opens no connection."""
    config = service_config(effective)
    problems = [
        *(
            effective.problem(key, message)
            for key in KIND_OF
            for target in effective[key] or ()
            if (message := _error_of_attempt(lambda target=target, key=key: _try_target(target, KIND_OF[key])))  # type: ignore[misc]
        ),
        *(effective.problem("alert", message) for message in bad_receivers(effective)),
    ]
    attempts = {
        "otlp": lambda: _try_endpoint(effective["otlp"]),
        "archive": lambda: _try_archive(effective["archive"]),
    }
    for key, attempt in attempts.items():
        if effective[key] and (message := _error_of_attempt(attempt)):
            problems.append(effective.problem(key, message))
    if message := _error_of_attempt(lambda: require_token(config.host, config.token)):
        problems.append(effective.problem("host", message))
    effective.refuse(problems)


def _bus(effective: Effective) -> BusConfig | None:
    """Return where NATS is, if it is asked for. Raises ValueError."""
    if not effective["nats"]:
        return None
    place = {key: effective[key] for key in ("zone", "node", "service", "kv_role")}
    return bus_config(effective.__getitem__, share=effective["nats_share"], **place)


def _events(effective: Effective, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the streams to read: by default the local one, unless other engines are named."""
    if effective["events"] is not None:
        return tuple(effective["events"])
    return () if effective["metrics"] or targets or effective.discovery else (EVENTS_ENDPOINT,)


def _recordings_and_targets(effective: Effective) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return the recordings and the other targets. Raises BadConfiguration."""
    recordings: list[str] = []
    targets: list[str] = []
    problems = []
    for target in effective["targets"]:
        try:
            (recordings if is_recording(target) else targets).append(target)
        except BadTarget as error:
            problems.append(effective.problem("targets", str(error)))
    effective.refuse(problems)
    return tuple(effective["recording"]) + tuple(map(Path, recordings)), tuple(targets)


def _contradictions(effective: Effective, recordings: tuple[Path, ...], targets: tuple[str, ...]) -> Iterator[Problem]:
    """Yield settings that make no sense together."""
    given = [key for key in LIVE if effective.layers[key] in ("flag", "file") and effective[key]]
    if recordings and (targets or effective.discovery or [key for key in given if key != "targets"]):
        yield effective.problem(
            "recording",
            "a recording shows what is over, and alone: leave out events, metrics, alert, otlp, data and discoveries,"
            " and every target that is live",
        )
    if effective["data"] is None:
        for key in ("keep_days", "keep_bytes"):
            if effective[key] is not None:
                yield effective.problem(key, "this limits what --data DIR keeps: set data, too")
        if effective["archive"]:
            yield effective.problem("archive", "an archive copies what --data DIR keeps: set data, too")
    for key in ("nats_agent", "nats_creds", "nats_ca", "nats_cert", "nats_key", "nats_share"):
        if effective[key] and not effective["nats"]:
            yield effective.problem(key, "this is of a connection to NATS: set nats, too")
    if effective["otlp_sample"] is not None and not effective["otlp"]:
        yield effective.problem("otlp_sample", "this is the share of what goes to --otlp URL: set otlp, too")


def _bad_values(effective: Effective) -> Iterator[Problem]:
    """Yield thresholds that there are not, and a connection to NATS that cannot be."""
    if message := _error_of_attempt(lambda: _bus(effective)):
        yield effective.problem("nats", message)
    for text in effective[THRESHOLDS_KEY]:
        try:
            parse_settings([text])
        except ValueError as error:
            problem = effective.problem(THRESHOLDS_KEY, str(error))
            name = f"{THRESHOLDS_KEY}.{text.partition('=')[0]}"
            line = effective.file.line_of(name) if problem.line and effective.file is not None else 0
            yield problem._replace(line=line or problem.line)


def bad_receivers(effective: Effective) -> Iterator[str]:
    """Yield what is wrong with the receivers of alerts."""
    for url in effective["alert"]:
        try:
            receiver_of(url, effective["webhook_secret"], effective["alert_private"])
        except BadReceiver as error:
            yield str(error)


def _try_target(target: str, kind: TargetKind | None) -> None:
    open_source(target, SourceOptions(follow=True), kind).close()


def _try_endpoint(url: str) -> None:
    for exporter in exporters_for(url):
        exporter.shutdown()


def _try_archive(url: str) -> None:
    try:
        from ..history.archive_store import Archive, archive_directory
    except ImportError as error:
        raise ValueError(f"needs more than is installed: {install_hint('history')} ({error})") from error
    if archive_directory(url) is None:
        Archive(url)


def _error_of_attempt(attempt: Callable[[], object]) -> str:
    """Return why an attempt is refused, empty if it is not."""
    try:
        attempt()
    except (BadTarget, CannotTell, ContractError, BadEndpoint, ValueError) as error:
        return str(error)
    return ""


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


HIDDEN: Final = "(hidden)"


def setting_lines(effective: Effective) -> Iterator[str]:
    """Yield each setting that has a value as a line of TOML. Secrets, and passwords in addresses, are hidden."""
    in_force = effective.values | {"events": service_config(effective).events}
    for key, setting in SETTINGS.items():
        if key != THRESHOLDS_KEY and in_force[key] is not None:
            yield f"{key} = {_value_text(setting, in_force[key])}  # {effective.layers[key]}"
    yield from _discovery_lines(effective)
    if effective[THRESHOLDS_KEY]:
        yield ""
        yield f"[{THRESHOLDS_KEY}]  # {effective.layers[THRESHOLDS_KEY]}"
        for text in effective[THRESHOLDS_KEY]:
            name, _, value = text.partition("=")
            yield f"{name} = {value}"


def _discovery_lines(effective: Effective) -> Iterator[str]:
    for config in effective.discovery:
        yield ""
        yield f"[[{next(table for table, kind in DISCOVERIES.items() if isinstance(config, kind))}]]"
        for name, value in msgspec.to_builtins(config).items():
            if isinstance(value, dict):
                pairs = (f"{json.dumps(key)} = {json.dumps(text)}" for key, text in value.items())
                yield f"{name} = {{ {', '.join(pairs)} }}"
            else:
                text = re.sub(r"\?.*", f"?{HIDDEN}", shown(value)) if name == "url" else value
                yield f"{name} = {json.dumps(text, ensure_ascii=False)}"


def _value_text(setting: Setting, value: Any) -> str:
    if isinstance(value, tuple):
        return json.dumps([HIDDEN if setting.is_secret else shown(str(each)) for each in value], ensure_ascii=False)
    if isinstance(value, Path):
        value = str(value)
    elif setting.parse in (length, length_or_never) and value:
        value = f"{value}s"
    if isinstance(value, str):
        value = HIDDEN if setting.is_secret and value else shown(value)
    return json.dumps(value, ensure_ascii=False)


def run_service(parsed: argparse.Namespace, mount: Mount | None = None) -> int:
    """Run until it is stopped, and return the exit code. Raises ValueError for what cannot be run.

    mount: puts the page on the app (None: no page).
    """
    layers = settings_layers(parsed)

    def load() -> LoadedConfig:
        effective = layers.read()
        refuse_what_cannot_run(effective)
        return loaded_config(effective)

    return serve(loaded_config(layers.read()), mount, load if layers.path is not None else None)
