"""Makes the service's configuration of the settings in force, and finds what the service could not run with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from kvscope.monitor.alerting.alerting import AlertsConfig
from kvscope.monitor.alerting.receivers.parse import receiver_of
from kvscope.monitor.alerting.receivers.receiver import BadReceiver
from kvscope.monitor.bus.bus_config import BusConfig, bus_config
from kvscope.monitor.configuration.effective import Effective
from kvscope.monitor.configuration.settings_file import Problem
from kvscope.monitor.configuration.settings_table import SETTINGS, THRESHOLDS_KEY
from kvscope.monitor.detectors.registry import parse_settings
from kvscope.monitor.errors import BadTarget, CannotTell, ContractError
from kvscope.monitor.exporters.otel.otel_exporter import OtelConfig
from kvscope.monitor.exporters.otel.otlp_exporters import BadEndpoint, exporters_for
from kvscope.monitor.exporters.remote_write.remote_writer import RemoteWriteConfig, remote_write_url
from kvscope.monitor.history.archive_store import Archive, archive_directory
from kvscope.monitor.history.retention import Keep
from kvscope.monitor.publishing.publisher import EVENTS_ENDPOINT
from kvscope.monitor.service.reload import LoadedConfig
from kvscope.monitor.service.service import ServiceConfig
from kvscope.monitor.service.web_server import require_token
from kvscope.monitor.sources.source import SourceOptions
from kvscope.monitor.sources.source_registry import is_recording, open_source
from kvscope.monitor.sources.targets import TargetKind

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
        alerts=AlertsConfig(
            receivers=effective["alert"],
            secret=effective["webhook_secret"],
            allow_private=effective["alert_private"],
            repeat_s=float(effective["alert_repeat"]),
            least_verdict=effective["alert_verdict"],
            path=data / "alerts.sqlite" if data is not None else None,
        ),
        otlp=OtelConfig(effective["otlp"], **_given(sample=effective["otlp_sample"])) if effective["otlp"] else None,
        settings=thresholds,
        data=data,
        keep=Keep(**_given(days=effective["keep_days"], bytes=effective["keep_bytes"])),
        discovery=effective.discovery,
        archive=effective["archive"],
        remote_write=_remote_write(effective),
        bus=_bus(effective),
        **shared,
        **_given(look_back_s=effective["look_back"]),
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
        "remote_write": lambda: remote_write_url(effective["remote_write"]),
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


def _remote_write(effective: Effective) -> RemoteWriteConfig | None:
    url, token = effective["remote_write"], effective["remote_write_token"]
    return RemoteWriteConfig(url, token) if url else None


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
        for key in ("archive", "remote_write"):
            if effective[key]:
                yield effective.problem(key, "archive and remote write copy what --data DIR keeps: set data, too")
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
