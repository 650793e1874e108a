"""`monitor alerts`: deliveries, tests and silences."""

from __future__ import annotations

import argparse
import os

from kvscope.monitor.alerting.alerts_client import AlertsClient
from kvscope.monitor.alerting.alerts_table import alerts_table
from kvscope.monitor.commands.shared_flags import DEFAULT_URL, Commands, default_url
from kvscope.monitor.configuration.value_types import length
from kvscope.monitor.doctor.report import FINDINGS, NOTHING
from kvscope.monitor.doctor.terminal import terminal_console
from kvscope.monitor.text import escaped


def add(commands: Commands) -> None:
    """Put it on the command line."""
    parser = commands.add_parser("alerts", help="list, test and silence the alerts of a running service")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    exit_codes = "exit codes: 0, 2 for a wrong command line, 3 for a service that does not answer"
    shown = actions.add_parser("list", help="list receivers, open alerts, silences and the latest deliveries")
    shown.set_defaults(run=_list)
    test = actions.add_parser("test", help="send a test alert to one receiver, or to all, and print the responses")
    test.add_argument(
        "receiver", nargs="?", default="", metavar="RECEIVER", help="name of the receiver in the output of `list`"
    )
    test.set_defaults(run=_test)
    silence = actions.add_parser(
        "silence",
        help="silence matching alerts for some time",
        description=(
            "Alerts that match all patterns are not sent until the silence ends. Those that still fire are sent then."
        ),
    )
    silence.add_argument(
        "matchers",
        nargs="+",
        metavar="NAME=PATTERN",
        help="code, engine, severity, verdict or key, such as 'code=leak.*'",
    )
    silence.add_argument(
        "--for",
        type=length,
        required=True,
        metavar="TIME",
        dest="seconds",
        help="length of the silence: 30m, 2h, 1d12h",
    )
    silence.add_argument("--comment", default="", metavar="TEXT", help="the reason, shown in the list")
    silence.set_defaults(run=_silence)
    unsilence = actions.add_parser("unsilence", help="end a silence")
    unsilence.add_argument("number", type=int, metavar="NUMBER", help="number in the output of `list`")
    unsilence.set_defaults(run=_unsilence)
    replay = actions.add_parser("replay", help="send a message of the delivery log again, with its id")
    replay.add_argument("number", type=int, metavar="NUMBER", help="number in the output of `list`")
    replay.set_defaults(run=_replay_delivery)
    for action in (shown, test, silence, unsilence, replay):
        action.epilog = f"{exit_codes}, 1 if a test did not arrive" if action is test else exit_codes
        action.add_argument("--url", default="", metavar="URL", help=f"the service (KVSCOPE_URL, else {DEFAULT_URL})")
        action.add_argument(
            "--token", default=os.environ.get("KVSCOPE_TOKEN", ""), help="the service's token (KVSCOPE_TOKEN)"
        )


def _client(parsed: argparse.Namespace) -> AlertsClient:
    return AlertsClient(parsed.url or default_url(), parsed.token)


def _list(parsed: argparse.Namespace) -> int:
    alerts_table(_client(parsed).view(), terminal_console())
    return NOTHING


def _test(parsed: argparse.Namespace) -> int:
    tried = _client(parsed).test(parsed.receiver)
    for one in tried:
        print(escaped(f"{'delivered' if one.delivered else 'NOT delivered'}  {one.receiver}  {one.answer}"))
    return NOTHING if all(one.delivered for one in tried) else FINDINGS


def _silence(parsed: argparse.Namespace) -> int:
    print(f"silence {_client(parsed).silence(parsed.matchers, parsed.seconds, parsed.comment)}")
    return NOTHING


def _unsilence(parsed: argparse.Namespace) -> int:
    _client(parsed).unsilence(parsed.number)
    return NOTHING


def _replay_delivery(parsed: argparse.Namespace) -> int:
    _client(parsed).replay(parsed.number)
    return NOTHING
