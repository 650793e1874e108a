"""`monitor alerts`: deliveries, tests and silences: the requests to a running service, and its answers as tables."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...base.bounded_http import BoundedClient, HttpFailed, status_text
from ...base.errors import Unreachable
from ...base.http_url import address_of
from ...base.text import escaped
from ...outputs.alerting.message import AlertsView, TriedView
from ...questions.client import Refusal, no_service
from ...service.settings_table import length
from ..report import FINDINGS, NOTHING
from ..terminal import terminal_console
from .shared_flags import DEFAULT_URL, default_url

AlertAnswer = TypeVar("AlertAnswer")

ALERTS_TIMEOUT_S = 60.0
"""A test waits for each receiver."""


class AlertsClient:
    """Asks the service at `url`. Raises BadTarget if that is not an address, Unreachable if no service answers there,
    and ValueError for what it refuses.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self._url = address_of(url)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def view(self) -> AlertsView:
        """Receivers, open alerts, silences, and the latest deliveries."""
        return self._ask("GET", "/api/alerts", AlertsView)

    def test(self, receiver: str = "") -> list[TriedView]:
        """Send a test to that receiver, or to all."""
        return self._ask("POST", "/api/alerts/test", list[TriedView], {"receiver": receiver})

    def silence(self, matchers: Sequence[str], seconds: float, comment: str = "") -> int:
        """Send nothing about alerts that match, for that long. Return the silence's number."""
        asked = {"matchers": list(matchers), "seconds": seconds, "comment": comment}
        return self._ask("POST", "/api/alerts/silences", int, body=msgspec.json.encode(asked))

    def unsilence(self, number: int) -> None:
        """End a silence."""
        self._ask("DELETE", f"/api/alerts/silences/{number}", type(None))

    def replay(self, number: int) -> None:
        """Send a message of the delivery log again."""
        self._ask("POST", f"/api/alerts/deliveries/{number}/replay", type(None))

    def _ask(
        self,
        method: str,
        path: str,
        expected: type[AlertAnswer],
        parameters: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> AlertAnswer:
        try:
            with BoundedClient(ALERTS_TIMEOUT_S, headers=self._headers) as client:
                answer = client.ask(method, self._url.below(path, parameters), body=body)
            if answer.status == HTTPStatus.UNAUTHORIZED:
                raise Unreachable(f"{self._url} wants a token: give it with --token or KVSCOPE_TOKEN")
            if answer.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND):
                raise ValueError(answer.decoded(Refusal).detail)
            if not answer.is_success:
                raise HttpFailed(f"answers {status_text(answer.status)}")
            return answer.decoded(expected)
        except HttpFailed as error:
            raise no_service(self._url, error) from error


MOST_DELIVERIES = 20


def alerts_table(view: AlertsView, console: Console) -> None:
    """Receivers, open alerts, silences, and the latest deliveries, each with the number or name that commands take."""
    _terminal_table(
        console,
        "RECEIVERS",
        ("name", "host", "pending", "state"),
        [
            (one.name, one.host, str(one.pending), _state_text(one.disabled_at, one.paused_until))
            for one in view.receivers
        ],
    )
    _terminal_table(
        console,
        "OPEN ALERTS",
        ("alert", "severity", "code", "engine", "since"),
        [
            (one.id, one.severity, one.code + (" (flapping)" if one.flapping else ""), one.engine, one.since or "")
            for one in view.open
        ],
    )
    _terminal_table(
        console,
        "SILENCES",
        ("number", "matchers", "until", "comment"),
        [(str(one.number), " ".join(one.matchers), one.until, one.comment) for one in view.silences],
    )
    _terminal_table(
        console,
        "DELIVERIES",
        ("number", "at", "kind", "code", "receiver", "state", "tries", "answer"),
        [
            (
                str(one.number),
                one.created_at[:19],
                one.kind,
                one.code,
                one.receiver,
                one.state,
                str(one.tries),
                one.answer,
            )
            for one in view.deliveries[:MOST_DELIVERIES]
        ],
    )


def _state_text(disabled_at: str | None, paused_until: str | None) -> str:
    if disabled_at:
        return f"disabled since {disabled_at}: it answered 410. `monitor alerts test` enables it if the test succeeds"
    return f"paused until {paused_until}, as it asked" if paused_until else "ready"


def _terminal_table(console: Console, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    console.print(f"{title}  {len(rows) or 'none'}", style="bold")
    if rows:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in columns:
            table.add_column(column, style="", header_style="dim", overflow="fold")
        for row in rows:
            table.add_row(*(escape(escaped(cell)) for cell in row))
        console.print(table)
    console.print()


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
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
