"""The receivers of alerts: the address of each kind, and how it wants a message.

Webhook        JSON, signed by the Standard Webhooks specification (standardwebhooks.com)
Alertmanager   POST /api/v2/alerts. It groups, reminds and routes by itself. It identifies an alert by its labels, and
               resolves one that is not repeated until `endsAt`. So a firing alert is sent again and again, as by
               Prometheus
Slack          an incoming webhook: a message in a channel, in blocks, with a line of plain text for notifications
PagerDuty      Events API v2: an incident opens with the first message of an alert and is resolved with its last
PluginReceiver receivers of other distributions, by the entry points of the group `kvscope.receivers`, contained. The
               name of the entry point is the URL's scheme, alone or before +http(s): acme://HOST/PATH,
               acme+https://HOST/PATH. Its object is called with the URL and returns a Receiver

Alerts go to public addresses, and to private ones only where that is allowed.
"""

from __future__ import annotations

import hashlib
import ipaddress
from base64 import b64decode
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final, NamedTuple

import msgspec
from standardwebhooks.webhooks import Webhook as Signer

from ...base import plugins
from ...base.bounded_http import HttpFailed, addresses_of
from ...base.errors import KvscopeError
from ...base.http_url import BadUrl, HttpUrl, http_url
from ...base.text import counted, cut, listed
from .message import AlertedFinding, Message, without_links

UNICAST: Final = ipaddress.IPv6Network("2000::/3")
"""All of IPv6 that is assigned to public networks. Source: IANA, "IPv6 Address Space"."""
PROTOCOL_ASSIGNMENTS: Final = ipaddress.IPv4Network("192.0.0.0/24")
"""Where clouds have services of their own. Python's releases differ in which of it they call global."""
EMBEDDING: Final = {
    ipaddress.IPv6Network("::/96"): 0,  # IPv4-compatible, RFC 4291; it has ::1 as well
    ipaddress.IPv6Network("::ffff:0:0/96"): 0,  # IPv4-mapped, RFC 4291
    ipaddress.IPv6Network("::ffff:0:0:0/96"): 0,  # IPv4-translated, RFC 2765
    ipaddress.IPv6Network("64:ff9b::/96"): 0,  # NAT64, RFC 6052
    ipaddress.IPv6Network("2002::/16"): 80,  # 6to4, RFC 3056
}
"""The IPv6 forms of IPv4 addresses, and how many bits follow the IPv4 address."""


class NotAllowed(HttpFailed):
    """A host is, or resolves to, an address that must not receive alerts. The message names the setting that allows
    it.
    """


def is_public(address: str) -> bool:
    """Whether an IP address is public. An IPv4 address in an IPv6 form counts as itself."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        after = next((bits for network, bits in EMBEDDING.items() if parsed in network), None)
        if after is None:
            return parsed in UNICAST and parsed.is_global
        parsed = ipaddress.IPv4Address(int(parsed) >> after & 0xFFFFFFFF)
    return parsed.is_global and not parsed.is_multicast and parsed not in PROTOCOL_ASSIGNMENTS


def public_addresses_of(host: str, port: int) -> list[str]:
    """Return the addresses to connect to. A single look-up decides, so that a name cannot resolve to a public address
    for the check and to a private one for the call. Raises NotAllowed, and HttpFailed for a name that is not known.
    """
    addresses = addresses_of(host, port)
    for address in addresses:
        if not is_public(address):
            raise NotAllowed(f"is at the private address {address}: --alert-private allows that")
    return addresses


def require_public(host: str) -> None:
    """Refuse a host that is private without a look-up: an address written out, or localhost. Raises NotAllowed."""
    if host == "localhost" or host.endswith(".localhost"):
        raise NotAllowed("is this machine: --alert-private allows that")
    try:
        public = is_public(host)
    except ValueError:
        return  # a name, which is looked up at each try
    if not public:
        raise NotAllowed("is a private address: --alert-private allows that")


class BadReceiver(KvscopeError, ValueError):
    """An --alert URL or a secret that cannot be used. The message names the valid form, and repeats no secret."""


class ReceiverFailed(Exception):
    """A receiver could not format a message. The error repeats no secret."""


class Post(NamedTuple):
    """The HTTP request for a message."""

    headers: dict[str, str]
    body: bytes


class Receiver:
    """One receiver. Its `name` appears everywhere, its `url`, which may be a secret, nowhere. A user in the URL is sent
    as basic authentication.
    """

    kind: ClassVar[str]
    refuses: ClassVar[frozenset[int]] = frozenset()
    """Answers that another try cannot change."""
    renew_s: ClassVar[float] = 0.0
    """The receiver forgets an alert that is not repeated this often, and sends its own reminders (0: neither)."""
    ends_tests: ClassVar[bool] = False
    """An alert from a test stays open there until it is resolved."""

    def __init__(self, url: HttpUrl) -> None:
        self.url = url
        whole = f"{self.kind} {url} {self.secret()}"
        self.name = f"{self.kind}-{hashlib.blake2b(whole.encode(), digest_size=4).hexdigest()}"

    def secret(self) -> str:
        """Return the part that separates it from another receiver at the same URL. Callers hash it."""
        return f"{self.url.username}:{self.url.password}" if self.url.username or self.url.password else ""

    def post(self, message: Message, now: datetime) -> Post:
        """Return the HTTP request for a message at `now`."""
        raise NotImplementedError


def json_post(value: Any) -> Post:
    """Return a value as a JSON request."""
    return Post({"content-type": "application/json"}, msgspec.json.encode(value))


SECRET_BYTES: Final = range(24, 65)


class Webhook(Receiver):
    """Any HTTP server. With a secret, the message is signed."""

    kind: ClassVar[str] = "webhook"

    def __init__(self, url: HttpUrl, secret: str) -> None:
        super().__init__(url)
        self._signer = _signer(secret) if secret else None

    def post(self, message: Message, now: datetime) -> Post:
        """Return a body that is the same at every try. Only the time of sending, and so the signature, differs."""
        kind = "kvscope.test" if message.kind == "test" else f"kvscope.finding.{message.kind}"
        data: dict[str, Any] = msgspec.to_builtins(message.finding)
        data |= {"firing_on_engine": message.firing, "repeat": message.repeat, "flapping": message.flapping}
        data["changes"] = message.changes
        post = json_post({"type": kind, "timestamp": message.at, "data": data})
        post.headers["webhook-id"] = message.id
        post.headers["webhook-timestamp"] = str(int(now.timestamp()))
        if self._signer is not None:
            post.headers["webhook-signature"] = self._signer.sign(message.id, now, post.body.decode())
        return post


def _signer(secret: str) -> Signer:
    try:
        length = len(b64decode(secret.removeprefix("whsec_"), validate=True))
    except ValueError:
        length = 0
    if length not in SECRET_BYTES:
        raise BadReceiver("--webhook-secret: give whsec_ and 24 to 64 bytes in base64")
    return Signer(secret)


RENEW_S: Final = 60.0
ENDS_AFTER: Final = timedelta(seconds=4 * RENEW_S)
"""As Prometheus: three renewals may be lost."""


class Alertmanager(Receiver):
    """Its base URL without /api/v2. The labels match those of kvscope's Prometheus rules, so that both are one
    alert.
    """

    kind: ClassVar[str] = "alertmanager"
    refuses: ClassVar[frozenset[int]] = frozenset({400})
    renew_s: ClassVar[float] = RENEW_S

    def post(self, message: Message, now: datetime) -> Post:
        """One alert, and the end of the one before it if its severity, which is a label, has changed. `key`, which
        separates problems of the same code, is a label where there is one.
        """
        alerted = message.finding
        labels = {
            "alertname": "KvscopeTest" if message.kind == "test" else "KvscopeFinding",
            "engine": alerted.engine,
            "code": alerted.code,
            "severity": alerted.severity,
            "key": alerted.key,
            "runbook": alerted.runbook,
        }
        ends = _rfc3339(now + ENDS_AFTER)
        if message.kind == "resolved":
            ends = alerted.resolved_at or _rfc3339(now)
        alert: dict[str, Any] = {
            "labels": {name: value for name, value in labels.items() if value},
            "annotations": {
                "summary": alerted.headline,
                "description": alerted.text,
                "do_now": "\n".join(alerted.do_now),
                "verdict": alerted.verdict,
                "finding": alerted.id,
            },
            "startsAt": min(alerted.since or message.at, ends),
            "endsAt": ends,
        }
        if alerted.links is not None:
            alert["generatorURL"] = alerted.links.finding
            alert["annotations"] |= {"engine_url": alerted.links.engine, "runbook_url": alerted.links.runbook}
        if message.severity_before in (None, alerted.severity):
            return json_post([alert])
        before = {**alert, "labels": {**alert["labels"], "severity": message.severity_before}, "endsAt": _rfc3339(now)}
        return json_post([before, alert])


def _rfc3339(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


LONGEST_HEADER: Final = 150
LONGEST_SECTION: Final = 3_000
"""Slack refuses what is longer (characters, after escaping)."""
MARKS: Final = {"critical": "🔴", "error": "🔴", "warning": "🟠", "info": "🔵"}


class Slack(Receiver):
    """The webhook's URL is the secret."""

    kind: ClassVar[str] = "slack"
    refuses: ClassVar[frozenset[int]] = frozenset({400, 403, 404})
    """invalid_payload, action_prohibited, no_service."""

    def post(self, message: Message, now: datetime) -> Post:
        """Return a header, the finding, its remedy, and the number of other findings on the engine."""
        alerted = message.finding
        header = f"{_slack_mark(message)} {alerted.headline}"
        blocks: list[dict[str, Any]] = [
            {"type": "header", "text": {"type": "plain_text", "text": cut(header, LONGEST_HEADER)}},
            _slack_section(_slack_escaped(alerted.text)),
        ]
        if message.kind != "resolved" and alerted.do_now:
            blocks.append(
                _slack_section("*Do now*\n" + "\n".join(f"• {_slack_escaped(line)}" for line in alerted.do_now))
            )
        if alerted.links is not None:
            texts = {"Finding": alerted.links.finding, "Engine": alerted.links.engine, "Runbook": alerted.links.runbook}
            blocks.append(_slack_section(" · ".join(f"<{_slack_escaped(url)}|{text}>" for text, url in texts.items())))
        blocks.append({"type": "context", "elements": [_mrkdwn(_slack_escaped(_slack_context(message, alerted)))]})
        text = cut(_slack_escaped(header), LONGEST_SECTION)
        return json_post({"text": text, "parse": "none", "unfurl_links": False, "blocks": blocks})


def _slack_mark(message: Message) -> str:
    if message.kind == "resolved":
        return "✅ Resolved:"
    word = "Changed:" if message.kind == "changed" else "Still:" if message.repeat else ""
    return f"{MARKS[message.finding.severity]} {word}".strip()


def _slack_context(message: Message, alerted: AlertedFinding) -> str:
    parts = [alerted.code, alerted.severity, alerted.verdict, alerted.since and f"since {alerted.since}"]
    parts += message.changes
    parts.append(f"causes: {listed(alerted.effects)}" if alerted.effects else "")
    others = [code for code in message.firing if code != alerted.code]
    parts.append(f"also firing there: {listed(others)}" if others else "")
    parts.append("it flaps: the next alert follows once it has been resolved for some time" if message.flapping else "")
    if alerted.culprits.requests_in_all:
        first = without_links(alerted.culprits.requests[0])
        parts.append(f"{counted(alerted.culprits.requests_in_all, 'request')}, {first} first")
    return " · ".join(filter(None, parts))


def _slack_section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": _mrkdwn(text)}


def _mrkdwn(text: str) -> dict[str, Any]:
    """Return a text without links, names of channels or mentions, whatever is in it."""
    return {"type": "mrkdwn", "text": cut(text, LONGEST_SECTION), "verbatim": True}


def _slack_escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


LONGEST_SUMMARY: Final = 1_024
KEY_LENGTH: Final = 32


class PagerDuty(Receiver):
    """A service's integration (routing) key, at events.pagerduty.com or events.eu.pagerduty.com."""

    kind: ClassVar[str] = "pagerduty"
    refuses: ClassVar[frozenset[int]] = frozenset({400})
    ends_tests: ClassVar[bool] = True

    def __init__(self, url: HttpUrl) -> None:
        routing_key = url.username
        if len(routing_key) != KEY_LENGTH or not routing_key.isalnum():
            raise BadReceiver("--alert pagerduty+https://ROUTING_KEY@…: a routing key is 32 letters and digits")
        self._routing_key = routing_key
        super().__init__(url._replace(path="/v2/enqueue", username="", password=""))

    def secret(self) -> str:
        """Many services share the URL."""
        return self._routing_key

    def post(self, message: Message, now: datetime) -> Post:
        """Return an event whose dedup key is the alert's id, with PagerDuty's own severities."""
        alerted = message.finding
        event: dict[str, Any] = {
            "routing_key": self._routing_key,
            "event_action": "resolve" if message.kind == "resolved" else "trigger",
            "dedup_key": alerted.id,
        }
        if message.kind != "resolved":
            details = msgspec.to_builtins(alerted) | {"firing_on_engine": message.firing, "changes": message.changes}
            details["culprits"]["requests"] = list(map(without_links, alerted.culprits.requests))
            event["client"] = "kvscope"
            if alerted.links is not None:
                event["client_url"] = alerted.links.finding
                event["links"] = [
                    {"href": alerted.links.engine, "text": "Engine"},
                    {"href": alerted.links.runbook, "text": "Runbook"},
                ]
            event["payload"] = {
                "summary": cut(alerted.headline, LONGEST_SUMMARY),
                "source": alerted.engine,
                "severity": alerted.severity,
                "timestamp": message.at,
                "component": "KV cache",
                "group": alerted.engine,
                "class": alerted.code,
                "custom_details": details,
            }
        return json_post(event)


RECEIVER_DEADLINE_S: Final = 10.0
"""How long a plug-in may take to make a receiver, or to format a message."""


class PluginReceiver(Receiver):
    """The receiver that `plugin` makes of `text`. Raises BadReceiver if it does not make one."""

    kind: ClassVar[str] = "plug-in"

    def __init__(self, plugin: plugins.Plugin, text: str, allow_private: bool) -> None:
        self._plugin = plugin
        try:
            receiver = plugins.call_within(RECEIVER_DEADLINE_S, lambda: plugin.target(text))
            if not isinstance(receiver, Receiver) or not isinstance(receiver.url, HttpUrl):
                raise TypeError("it made no Receiver with a URL")
            if not allow_private:
                require_public(receiver.url.host)
        except NotAllowed as error:
            raise BadReceiver(f"--alert: {receiver.url.host} {error}") from error
        except Exception as error:
            plugins.report_failure(plugin, error)
            raise BadReceiver(
                f"--alert: the plug-in {plugin.distribution} cannot make a receiver: {type(error).__name__}"
            ) from None
        self._receiver: Receiver = receiver
        self.url, self.name = receiver.url, receiver.name
        self.refuses, self.renew_s, self.ends_tests = receiver.refuses, receiver.renew_s, receiver.ends_tests  # type: ignore[misc]

    def post(self, message: Message, now: datetime) -> Post:
        """Return what the plug-in posts for a message. Raises ReceiverFailed where it raises or hangs."""
        try:
            return plugins.call_within(RECEIVER_DEADLINE_S, lambda: self._receiver.post(message, now))
        except Exception as error:
            plugins.report_failure(self._plugin, error)
            raise ReceiverFailed(f"the plug-in {self._plugin.distribution} failed: {type(error).__name__}") from error


def receiver_plugin(text: str) -> plugins.Plugin | None:
    """Return the plug-in for a receiver's URL, if there is one."""
    scheme = text.partition("://")[0].partition("+")[0]
    return next((plugin for plugin in plugins.load(plugins.RECEIVER_GROUP) if plugin.name == scheme), None)


BUILT_IN: Final = ("webhook", "alertmanager", "slack", "pagerduty")
HOW: Final = (
    "give https://HOST/PATH (a webhook), alertmanager+http://HOST:9093, slack+https://hooks.slack.com/services/… or"
    " pagerduty+https://ROUTING_KEY@events.pagerduty.com"
)


def receiver_of(text: str, secret: str = "", allow_private: bool = False) -> Receiver:
    """Return the receiver for the URL `text`. Webhooks are signed with `secret`.

    Raises BadReceiver, whose message does not repeat what was given: it may be a secret.
    """
    kind, plus, rest = text.partition("+")
    if not plus or "/" in kind:
        kind, rest = "webhook", text
    is_http = rest.lower().startswith(("http://", "https://"))
    if (kind not in BUILT_IN or not is_http) and (plugin := receiver_plugin(text)) is not None:
        return PluginReceiver(plugin, text, allow_private)
    if kind not in BUILT_IN:
        raise BadReceiver(f"--alert: one of the URLs is of a kind that is not known; {HOW}")
    try:
        url = http_url(rest)
        if not allow_private:
            require_public(url.host)
    except BadUrl as error:
        raise BadReceiver(f"--alert: the URL of a {kind} receiver cannot be used: {error}; {HOW}") from error
    except NotAllowed as error:
        raise BadReceiver(f"--alert: {url.host} {error}") from error
    if kind == "pagerduty":
        return PagerDuty(url)
    if kind == "slack":
        return Slack(url)
    if kind == "alertmanager":
        return Alertmanager(url.below("/api/v2/alerts"))
    return Webhook(url, secret)
