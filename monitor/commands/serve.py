"""`monitor serve`: page, API, /metrics and alerts, on one port."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from kvscope.monitor.commands.shared_flags import Commands, length, port, positive, size
from kvscope.monitor.detectors.judgement import VERDICTS
from kvscope.monitor.detectors.registry import parse_settings
from kvscope.monitor.publishing.publisher import EVENTS_ENDPOINT
from kvscope.monitor.sources.source_registry import is_recording


def _repeat(text: str) -> int:
    return 0 if text == "0" else length(text)


def add(commands: Commands) -> None:
    """Put it on the command line."""
    parser = commands.add_parser(
        "serve",
        help="the service: page, API, /metrics, alerts",
        description="Reads engines' event streams and metrics pages, and serves what they say: web page, API and"
        " /metrics on one port.",
    )
    _add_source_flags(parser)
    _add_service_flags(parser)
    _add_copy_flags(parser)
    _add_alert_flags(parser)
    _add_otlp_flags(parser)
    parser.add_argument(
        "--set", action="append", default=[], metavar="CODE.NAME=VALUE", dest="thresholds", help="change a threshold"
    )
    parser.set_defaults(run=_run)


def _add_source_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="a source of any kind: an event stream, a metrics page, a log that grows, a Prometheus server"
        " (prometheus+http://HOST:9090), KV events; or recordings alone",
    )
    parser.add_argument(
        "--events",
        action="append",
        metavar="ENDPOINT",
        help=f"an engine's event stream; may be repeated (default: KVSCOPE_EVENTS, else {EVENTS_ENDPOINT}, or none if"
        " --metrics or a TARGET is given)",
    )
    parser.add_argument(
        "--metrics",
        action="append",
        default=[],
        metavar="URL",
        help="the metrics page of an engine without a probe, scraped every 5 s; may be repeated",
    )


def _add_service_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1); elsewhere a token is needed")
    parser.add_argument("--port", type=port, default=8765, help="(8765; 0 picks a free one)")
    parser.add_argument("--token", default=os.environ.get("KVSCOPE_TOKEN", ""), help="ask for this (KVSCOPE_TOKEN)")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="keep alerts here, so that a restart loses none and sends none anew, and all that is heard, so that any"
        " moment of it can be asked for (KVSCOPE_DATA)",
    )
    parser.add_argument("--keep-days", type=positive, metavar="DAYS", help="what is heard is kept for so long (7)")
    parser.add_argument(
        "--keep-bytes",
        type=size,
        metavar="SIZE",
        help="and no more of it than this, the oldest goes first: 500M, 2G (10G)",
    )
    parser.add_argument(
        "--look-back",
        type=length,
        metavar="TIME",
        help="at the start, read so much of what a Prometheus server stored: 30m, 1d (2h); the page shows it",
    )
    parser.add_argument(
        "--memory-budget",
        type=size,
        metavar="SIZE",
        help="keep the process within this much memory: less of the recent past in memory, the more engines report"
        " (GET /api/memory-budget lists what is given up)",
    )
    parser.add_argument(
        "--recording",
        action="append",
        type=Path,
        metavar="DIR",
        help="show this recording, and nothing else: no engine is read; may be repeated, to compare them",
    )


def _add_copy_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--archive",
        default="",
        metavar="URL",
        help="copy each closed segment of the history there, to s3://BUCKET/PREFIX (credentials and endpoint as AWS has"
        " them in the environment), file:///DIR or a directory; `monitor sql --archive URL` reads it",
    )
    parser.add_argument(
        "--remote-write",
        default="",
        metavar="URL",
        help="write the points of all engines to this Prometheus-compatible store: http://HOST:8428/api/v1/write",
    )
    parser.add_argument(
        "--remote-write-token",
        default=os.environ.get("KVSCOPE_REMOTE_WRITE_TOKEN", ""),
        metavar="TOKEN",
        help="with this bearer token (KVSCOPE_REMOTE_WRITE_TOKEN)",
    )


def _add_alert_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--alert",
        action="append",
        metavar="URL",
        help="send alerts here: https://… (a webhook), alertmanager+http://HOST:9093, slack+https://… or"
        " pagerduty+https://ROUTING_KEY@events.pagerduty.com; may be repeated (KVSCOPE_ALERTS, separated by spaces)",
    )
    parser.add_argument(
        "--alert-private", action="store_true", help="alerts may go to private addresses, this machine's among them"
    )
    parser.add_argument(
        "--alert-repeat",
        type=_repeat,
        default=4 * 3600,
        metavar="TIME",
        help="say again that an alert still fires: 30m, 4h (4h; 0 never)",
    )
    parser.add_argument(
        "--alert-verdict",
        choices=VERDICTS,
        default=VERDICTS[0],
        help="alert only once a finding has this verdict or a surer one (cannot-tell: all)",
    )
    parser.add_argument(
        "--webhook-secret",
        default=os.environ.get("KVSCOPE_WEBHOOK_SECRET", ""),
        metavar="whsec_…",
        help="sign what goes to webhooks with this (KVSCOPE_WEBHOOK_SECRET)",
    )


def _add_otlp_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--otlp",
        default="",
        metavar="URL",
        help="send traces of requests, findings as logs, and metrics to this OTLP endpoint: grpc://HOST:4317,"
        " grpcs://… or http(s)://HOST:4318",
    )
    parser.add_argument(
        "--otlp-sample",
        type=float,
        metavar="SHARE",
        help="of the requests that were neither slow, preempted, stuck nor failed, trace this share (1; 0.1 a tenth)",
    )


def _run(parsed: argparse.Namespace) -> int:
    try:
        from kvscope.monitor.alerting.alerting import AlertsConfig
        from kvscope.monitor.exporters.otel.otel_exporter import OtelConfig
        from kvscope.monitor.history.retention import Keep
        from kvscope.monitor.service.service import ServiceConfig
        from kvscope.monitor.service.web_server import serve
    except ImportError as error:
        raise ValueError(
            f"`monitor serve` needs more than the base install: pip install 'kvscope[monitor]' ({error})"
        ) from error
    from kvscope.dashboards.web.app import mount

    recordings, targets = _recordings_and_targets(parsed)
    if recordings and (targets or parsed.events or parsed.metrics or parsed.alert or parsed.otlp or parsed.data):
        raise ValueError(
            "--recording shows what is over, and alone: leave out --events, --metrics, --alert, --otlp and --data, and"
            " every target that is live"
        )
    data = parsed.data or (Path(os.environ["KVSCOPE_DATA"]) if os.environ.get("KVSCOPE_DATA") else None)
    keep, sample = _kept_and_sampled(parsed, data)
    by_default = os.environ.get("KVSCOPE_EVENTS", "" if parsed.metrics or targets else EVENTS_ENDPOINT)
    if recordings:
        return serve(
            ServiceConfig(
                events=(),
                recordings=recordings,
                host=parsed.host,
                port=parsed.port,
                token=parsed.token,
                settings=parse_settings(parsed.thresholds),
                memory_budget=parsed.memory_budget,
            ),
            mount,
        )
    return serve(
        ServiceConfig(
            events=tuple(parsed.events or filter(None, by_default.split(","))),
            metrics=tuple(parsed.metrics),
            targets=targets,
            host=parsed.host,
            port=parsed.port,
            token=parsed.token,
            alerts=AlertsConfig(
                receivers=tuple(parsed.alert or os.environ.get("KVSCOPE_ALERTS", "").split()),
                secret=parsed.webhook_secret,
                allow_private=parsed.alert_private,
                repeat_s=float(parsed.alert_repeat),
                least_verdict=parsed.alert_verdict,
                path=data / "alerts.sqlite" if data is not None else None,
            ),
            otlp=OtelConfig(parsed.otlp, **sample) if parsed.otlp else None,
            settings=parse_settings(parsed.thresholds),
            data=data,
            keep=Keep(**keep),
            memory_budget=parsed.memory_budget,
            **_copies(parsed, data) | _given(look_back_s=parsed.look_back),
        ),
        mount,
    )


def _kept_and_sampled(parsed: argparse.Namespace, data: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the limits of the history and the share of traces were set to. Raises ValueError."""
    keep = _given(days=parsed.keep_days, bytes=parsed.keep_bytes)
    sample = _given(sample=parsed.otlp_sample)
    if keep and data is None:
        raise ValueError("--keep-days and --keep-bytes are of what --data DIR keeps: give that too")
    if sample and not parsed.otlp:
        raise ValueError("--otlp-sample is of what goes to --otlp URL: give that too")
    return keep, sample


def _copies(parsed: argparse.Namespace, data: Path | None) -> dict[str, Any]:
    """Return where the history and points are copied to. Raises ValueError if no history is kept."""
    from kvscope.monitor.exporters.remote_write.remote_writer import RemoteWriteConfig

    if (parsed.archive or parsed.remote_write) and data is None:
        raise ValueError("--archive and --remote-write copy what --data DIR keeps: give that too")
    remote_write = RemoteWriteConfig(parsed.remote_write, parsed.remote_write_token)
    return {"archive": parsed.archive, "remote_write": remote_write if parsed.remote_write else None}


def _recordings_and_targets(parsed: argparse.Namespace) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return the recordings and the other targets of the command line. Raises BadTarget."""
    recordings = [target for target in parsed.targets if is_recording(target)]
    others = tuple(target for target in parsed.targets if target not in recordings)
    return tuple(parsed.recording or ()) + tuple(map(Path, recordings)), others


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
