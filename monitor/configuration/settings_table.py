"""The table of settings: every flag of `monitor serve` and `monitor agent`, and its key in a configuration file."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from kvscope.monitor.configuration.value_types import (
    length,
    length_or_never,
    port,
    positive,
    share,
    size,
    verdict,
)
from kvscope.monitor.detectors.judgement import VERDICTS
from kvscope.monitor.publishing.publisher import EVENTS_ENDPOINT

Shape = Literal["one", "list", "switch"]
THRESHOLDS_KEY: Final = "thresholds"


class Setting(NamedTuple):
    """A setting. `key` is its name in a file. Its flag is the same with dashes, unless `flag` names another.

    parse: reads its text. variable: of the environment, where `separator` splits its value into a list. is_live: a
    reload changes it while the service runs. is_secret: shown nowhere. of_agent: `monitor agent` has it, too.
    """

    key: str
    help: str
    parse: Callable[[str], Any] = str
    default: Any = None
    shape: Shape = "one"
    metavar: str | None = None
    flag: str = ""
    variable: str = ""
    separator: str | None = None
    is_live: bool = False
    is_secret: bool = False
    of_agent: bool = True

    @property
    def option(self) -> str:
        """The flag, or the name of a positional argument."""
        return self.flag or f"--{self.key.replace('_', '-')}"


SOURCE_SETTINGS: Final = (
    Setting(
        "targets",
        "a source of any kind: an event stream, a metrics page, a log that grows, a Prometheus server"
        " (prometheus+http://HOST:9090), KV events; or recordings alone",
        shape="list",
        metavar="TARGET",
        flag="targets",
        default=(),
        is_live=True,
    ),
    Setting(
        "events",
        f"an engine's event stream; may be repeated (default: KVSCOPE_EVENTS, else {EVENTS_ENDPOINT}, or none if"
        " --metrics or a TARGET is given)",
        shape="list",
        metavar="ENDPOINT",
        variable="KVSCOPE_EVENTS",
        separator=",",
        is_live=True,
    ),
    Setting(
        "metrics",
        "the metrics page of an engine without a probe, scraped every 5 s; may be repeated",
        shape="list",
        metavar="URL",
        default=(),
        is_live=True,
    ),
)
SERVICE_SETTINGS: Final = (
    Setting("host", "where to listen (127.0.0.1); elsewhere a token is needed", default="127.0.0.1"),
    Setting("port", "(8765; 0 picks a free one)", port, 8765),
    Setting("token", "ask for this (KVSCOPE_TOKEN)", default="", variable="KVSCOPE_TOKEN", is_secret=True),
    Setting(
        "data",
        "keep alerts here, so that a restart loses none and sends none anew, and all that is heard, so that any"
        " moment of it can be asked for (KVSCOPE_DATA)",
        Path,
        metavar="DIR",
        variable="KVSCOPE_DATA",
    ),
    Setting("keep_days", "what is heard is kept for so long (7)", positive, metavar="DAYS"),
    Setting("keep_bytes", "and no more of it than this, the oldest goes first: 500M, 2G (10G)", size, metavar="SIZE"),
    Setting(
        "look_back",
        "at the start, read so much of what a Prometheus server stored: 30m, 1d (2h); the page shows it",
        length,
        metavar="TIME",
    ),
    Setting(
        "memory_budget",
        "keep the process within this much memory: less of the recent past in memory, the more engines report"
        " (GET /api/memory-budget lists what is given up)",
        size,
        metavar="SIZE",
    ),
    Setting(
        "recording",
        "show this recording, and nothing else: no engine is read; may be repeated, to compare them",
        Path,
        default=(),
        shape="list",
        metavar="DIR",
        of_agent=False,
    ),
)
COPY_SETTINGS: Final = (
    Setting(
        "archive",
        "copy each closed segment of the history there, to s3://BUCKET/PREFIX (credentials and endpoint as AWS has"
        " them in the environment), file:///DIR or a directory; `monitor sql --archive URL` reads it",
        default="",
        metavar="URL",
    ),
    Setting(
        "remote_write",
        "write the points of all engines to this Prometheus-compatible store: http://HOST:8428/api/v1/write",
        default="",
        metavar="URL",
    ),
    Setting(
        "remote_write_token",
        "with this bearer token (KVSCOPE_REMOTE_WRITE_TOKEN)",
        default="",
        metavar="TOKEN",
        variable="KVSCOPE_REMOTE_WRITE_TOKEN",
        is_secret=True,
    ),
)
ALERT_SETTINGS: Final = (
    Setting(
        "alert",
        "send alerts here: https://… (a webhook), alertmanager+http://HOST:9093, slack+https://… or"
        " pagerduty+https://ROUTING_KEY@events.pagerduty.com; may be repeated (KVSCOPE_ALERTS, separated by spaces)",
        default=(),
        shape="list",
        metavar="URL",
        variable="KVSCOPE_ALERTS",
        is_live=True,
        is_secret=True,
    ),
    Setting(
        "alert_private",
        "alerts may go to private addresses, this machine's among them",
        default=False,
        shape="switch",
    ),
    Setting(
        "alert_repeat",
        "say again that an alert still fires: 30m, 4h (4h; 0 never)",
        length_or_never,
        4 * 3600,
        metavar="TIME",
    ),
    Setting(
        "alert_verdict",
        "alert only once a finding has this verdict or a surer one (cannot-tell: all)",
        verdict,
        VERDICTS[0],
        metavar=f"{{{','.join(VERDICTS)}}}",
    ),
    Setting(
        "webhook_secret",
        "sign what goes to webhooks with this (KVSCOPE_WEBHOOK_SECRET)",
        default="",
        metavar="whsec_…",
        variable="KVSCOPE_WEBHOOK_SECRET",
        is_secret=True,
    ),
)
OTLP_SETTINGS: Final = (
    Setting(
        "otlp",
        "send traces of requests, findings as logs, and metrics to this OTLP endpoint: grpc://HOST:4317,"
        " grpcs://… or http(s)://HOST:4318",
        default="",
        metavar="URL",
    ),
    Setting(
        "otlp_sample",
        "of the requests that were neither slow, preempted, stuck nor failed, trace this share (1; 0.1 a tenth)",
        share,
        metavar="SHARE",
    ),
)
BUS_SETTINGS: Final = (
    Setting(
        "nats",
        "a NATS server with JetStream: nats://127.0.0.1:4222, or tls://HOST:4222 on another machine; may be repeated,"
        " for the servers of one cluster",
        default=(),
        shape="list",
        metavar="URL",
    ),
    Setting("nats_tenant", "whose streams: a-z, 0-9 and - (default)", default="default", metavar="NAME"),
    Setting("nats_agent", "the name of this agent among others (the host's name)", default="", metavar="NAME"),
    Setting("nats_creds", "credentials: a .creds file, or a file with an nkey's seed", Path, metavar="FILE"),
    Setting("nats_ca", "the authority of the server's certificate", Path, metavar="FILE"),
    Setting("nats_cert", "this agent's own certificate", Path, metavar="FILE"),
    Setting("nats_key", "and its key", Path, metavar="FILE"),
)
PLACE_SETTINGS: Final = (
    Setting("zone", "where the engines are, for the fleet view (KVSCOPE_ZONE)", default="", variable="KVSCOPE_ZONE"),
    Setting("node", "the node that they are on, if it is one (KVSCOPE_NODE)", default="", variable="KVSCOPE_NODE"),
    Setting(
        "service",
        "the service that they belong to: a hub shows its prefill beside its decode engines (KVSCOPE_SERVICE)",
        default="",
        variable="KVSCOPE_SERVICE",
    ),
    Setting(
        "kv_role",
        "their side of it, producer (prefill) or consumer (decode), if their connector's role is kv_both"
        " (KVSCOPE_KV_ROLE)",
        default="",
        variable="KVSCOPE_KV_ROLE",
    ),
)
NATS_SHARE: Final = Setting(
    "nats_share",
    "share the engines with other agents that name the same ones: each is processed by the one agent that holds its"
    " lease, and another takes over when that agent dies",
    default=False,
    shape="switch",
)
SETTINGS: Final[dict[str, Setting]] = {
    setting.key: setting
    for setting in (
        *SOURCE_SETTINGS,
        *SERVICE_SETTINGS,
        *COPY_SETTINGS,
        *ALERT_SETTINGS,
        *OTLP_SETTINGS,
        *BUS_SETTINGS,
        NATS_SHARE,
        *PLACE_SETTINGS,
        Setting(
            THRESHOLDS_KEY,
            "change a threshold",
            default=(),
            shape="list",
            metavar="CODE.NAME=VALUE",
            flag="--set",
            is_live=True,
        ),
    )
}
"""Every setting, by its key in a configuration file. THRESHOLDS_KEY is a table there."""
CONFIG_FLAG: Final = "--config"
SettingUser = Literal["serve", "agent", "hub"]
HUB_KEYS: Final = frozenset(("host", "port", "token", *(setting.key for setting in (*ALERT_SETTINGS, *BUS_SETTINGS))))
"""Settings that `monitor hub` has: it reads no engine and keeps nothing."""


def settings_of(command: SettingUser) -> dict[str, Setting]:
    """Return the settings that a command has."""
    if command == "hub":
        return {key: setting for key, setting in SETTINGS.items() if key in HUB_KEYS}
    return {key: setting for key, setting in SETTINGS.items() if setting.of_agent or command == "serve"}


def add_flags(parser: argparse.ArgumentParser, command: SettingUser = "serve") -> None:
    """Add the flag of every setting of a command, and --config. A flag that is not given is not in the namespace."""
    parser.add_argument(
        CONFIG_FLAG,
        type=Path,
        metavar="FILE",
        dest="config",
        help="read settings from this TOML file; flags and variables override it. SIGHUP reads it again"
        " (`monitor config check FILE` checks it)",
    )
    for setting in settings_of(command).values():
        add_flag(parser, setting)


def add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    """Add the flag of a setting."""
    given: dict[str, Any] = {"help": setting.help, "default": argparse.SUPPRESS}
    if setting.shape == "switch":
        given["action"] = "store_true"
    else:
        given |= {"type": setting.parse, "metavar": setting.metavar}
    if setting.option.startswith("--"):
        if setting.shape == "list":
            given["action"] = "append"
        parser.add_argument(setting.option, dest=setting.key, **given)
    else:
        parser.add_argument(setting.option, nargs="*", **given)
