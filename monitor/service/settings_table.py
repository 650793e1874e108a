"""The table of settings: every flag of `monitor serve` and `monitor agent`, and its key in a configuration file.

The functions that read their texts (sizes, times, ports) raise argparse.ArgumentTypeError.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from ..base.http_url import BadUrl, http_url, shown
from ..detectors.judgement import VERDICTS, Verdict
from ..outputs.alerting.message import LEAST_VERDICT
from ..probes.publisher import EVENTS_ENDPOINT
from ..sources.prometheus_history import seconds


def positive(text: str) -> float:
    """Parse a number above 0, of seconds or days."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def port(text: str) -> int:
    """Parse a port to listen on. 0 is any free port."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: give a number up to 65535, or 0 for any that is free")
    return int(text)


def length(text: str) -> int:
    """Parse a length of time such as 30m, in seconds."""
    try:
        return seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size(text: str) -> int:
    """Parse a number of bytes such as 500M or 2G (of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not a size: write 500M or 2G")
    return round(float(match[1]) * 1024.0 ** " KMGT".index(match[2] or " "))


def length_or_never(text: str) -> int:
    """Parse a length of time in seconds, 0 for never."""
    return 0 if text == "0" else length(text)


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return value


def page_address(text: str) -> str:
    """Check the address of a page."""
    try:
        url = http_url(text)
    except BadUrl as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not the address of a page: {error}") from error
    if url.query or url.username or url.password:
        raise argparse.ArgumentTypeError("the address of a page has neither a query nor a password")
    return str(url)


def verdict(text: str) -> Verdict:
    """Parse a verdict."""
    for known in VERDICTS:
        if text == known:
            return known
    raise argparse.ArgumentTypeError(f"{text} is not a verdict: choose from {', '.join(VERDICTS)}")


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
        "an event stream, a metrics page, a growing log, a Prometheus server (prometheus+http://HOST:9090), KV"
        " events, or only recordings (repeatable)",
        shape="list",
        metavar="TARGET",
        flag="targets",
        default=(),
        is_live=True,
    ),
    Setting(
        "events",
        f"an engine's event stream (repeatable, default: KVSCOPE_EVENTS, else {EVENTS_ENDPOINT}, or none with"
        " --metrics or a TARGET)",
        shape="list",
        metavar="ENDPOINT",
        variable="KVSCOPE_EVENTS",
        separator=",",
        is_live=True,
    ),
    Setting(
        "metrics",
        "the metrics page of an engine without a probe, scraped every 5 s (repeatable)",
        shape="list",
        metavar="URL",
        default=(),
        is_live=True,
    ),
)
SERVICE_SETTINGS: Final = (
    Setting(
        "host", "address to listen on. Any other than loopback needs a token (default: 127.0.0.1)", default="127.0.0.1"
    ),
    Setting("port", "0 picks a free port (default: 8765)", port, 8765),
    Setting(
        "token", "token that clients must send (KVSCOPE_TOKEN)", default="", variable="KVSCOPE_TOKEN", is_secret=True
    ),
    Setting(
        "data",
        "directory for the history and the alerts. A restart then neither loses nor repeats alerts, and past times"
        " stay available (KVSCOPE_DATA)",
        Path,
        metavar="DIR",
        variable="KVSCOPE_DATA",
    ),
    Setting("keep_days", "days to keep the history (default: 7)", positive, metavar="DAYS"),
    Setting(
        "keep_bytes",
        "maximum size of the history: 500M, 2G. The oldest part is deleted first (default: 10G)",
        size,
        metavar="SIZE",
    ),
    Setting(
        "look_back",
        "how much of a Prometheus server's past to load at the start: 30m, 1d (default: 2h)",
        length,
        metavar="TIME",
    ),
    Setting(
        "memory_budget",
        "memory limit of the process. With many engines it keeps less of the recent past in memory (GET"
        " /api/memory-budget lists the reductions)",
        size,
        metavar="SIZE",
    ),
    Setting(
        "recording",
        "show this recording and read no engine (repeatable, to compare recordings)",
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
        "copy each closed segment of the history to s3://BUCKET/PREFIX (with AWS's environment variables),"
        " file:///DIR or a directory. `monitor sql --archive URL` reads it",
        default="",
        metavar="URL",
    ),
)
ALERT_SETTINGS: Final = (
    Setting(
        "alert",
        "where to send alerts: https://… (a webhook), alertmanager+http://HOST:9093, slack+https://… or"
        " pagerduty+https://ROUTING_KEY@events.pagerduty.com (repeatable, KVSCOPE_ALERTS: separated by spaces)",
        default=(),
        shape="list",
        metavar="URL",
        variable="KVSCOPE_ALERTS",
        is_live=True,
        is_secret=True,
    ),
    Setting(
        "alert_private",
        "allow alerts to private addresses, including this machine's",
        default=False,
        shape="switch",
    ),
    Setting(
        "public_url",
        "where people open this page: https://kvscope.example. Alerts link to the finding, its engine and its runbook"
        " there",
        page_address,
        metavar="URL",
    ),
    Setting(
        "alert_repeat",
        "how often to send an alert again while it fires: 30m, 4h. 0 never does (default: 4h)",
        length_or_never,
        4 * 3600,
        metavar="TIME",
    ),
    Setting(
        "alert_verdict",
        f"send alerts only for findings with at least this verdict (cannot-tell: all, default: {LEAST_VERDICT})",
        verdict,
        LEAST_VERDICT,
        metavar=f"{{{','.join(VERDICTS)}}}",
    ),
    Setting(
        "alert_engines_only",
        "send no alerts about kvscope itself: a reader that fails, a source that is never heard, a data directory that"
        " is full or gone",
        default=False,
        shape="switch",
    ),
    Setting(
        "webhook_secret",
        "secret that signs the messages to webhooks (KVSCOPE_WEBHOOK_SECRET)",
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
        "share of healthy requests to trace. Slow, preempted, stuck and failed ones always are (default: 1)",
        share,
        metavar="SHARE",
    ),
)
BUS_SETTINGS: Final = (
    Setting(
        "nats",
        "a NATS server with JetStream: nats://127.0.0.1:4222, or tls://HOST:4222 on another machine (repeatable,"
        " for the servers of a cluster)",
        default=(),
        shape="list",
        metavar="URL",
    ),
    Setting(
        "nats_tenant",
        "tenant whose streams to use: a-z, 0-9 and - (default: default)",
        default="default",
        metavar="NAME",
    ),
    Setting("nats_agent", "name of this agent (default: the host's name)", default="", metavar="NAME"),
    Setting("nats_creds", "credentials: a .creds file, or a file with the seed of an nkey", Path, metavar="FILE"),
    Setting("nats_ca", "certificate authority of the NATS server", Path, metavar="FILE"),
    Setting("nats_cert", "client certificate of this agent", Path, metavar="FILE"),
    Setting("nats_key", "private key of the client certificate", Path, metavar="FILE"),
)
PLACE_SETTINGS: Final = (
    Setting("zone", "zone of the engines, for the fleet view (KVSCOPE_ZONE)", default="", variable="KVSCOPE_ZONE"),
    Setting("node", "node of the engines, for the fleet view (KVSCOPE_NODE)", default="", variable="KVSCOPE_NODE"),
    Setting(
        "service",
        "service of the engines: a hub shows its prefill engines beside its decode engines (KVSCOPE_SERVICE)",
        default="",
        variable="KVSCOPE_SERVICE",
    ),
    Setting(
        "kv_role",
        "role of the engines in their service, producer (prefill) or consumer (decode), if their connector's role is"
        " kv_both (KVSCOPE_KV_ROLE)",
        default="",
        variable="KVSCOPE_KV_ROLE",
    ),
)
NATS_SHARE: Final = Setting(
    "nats_share",
    "share engines with other agents that have the same targets. The agent with an engine's lease processes it, and"
    " another takes over if that agent stops",
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
            "change a pending period or threshold (repeatable)",
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
        help="read settings from this TOML file. Flags and variables override it. SIGHUP reads it again"
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
