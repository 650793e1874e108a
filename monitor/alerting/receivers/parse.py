"""From an --alert URL to a receiver: http(s)://… is a webhook, KIND+http(s)://… one of the others."""

from __future__ import annotations

from typing import Final

import httpx

from kvscope.monitor.alerting.addresses import NotAllowed, require_public
from kvscope.monitor.alerting.receivers.alertmanager import Alertmanager
from kvscope.monitor.alerting.receivers.pagerduty import PagerDuty
from kvscope.monitor.alerting.receivers.plugin_receiver import PluginReceiver, receiver_plugin
from kvscope.monitor.alerting.receivers.receiver import BadReceiver, Receiver
from kvscope.monitor.alerting.receivers.slack import Slack
from kvscope.monitor.alerting.receivers.webhook import Webhook

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
    try:
        whole = httpx.URL(rest)
    except httpx.InvalidURL:
        raise BadReceiver(f"--alert: one of the URLs is not a URL; {HOW}") from None
    if kind not in BUILT_IN and (plugin := receiver_plugin(text)) is not None:
        return PluginReceiver(plugin, text, allow_private)
    if kind not in BUILT_IN:
        raise BadReceiver(f"--alert: one of the URLs is of a kind that is not known; {HOW}")
    if whole.scheme not in ("http", "https") and (plugin := receiver_plugin(text)) is not None:
        return PluginReceiver(plugin, text, allow_private)
    if whole.scheme not in ("http", "https") or not whole.host:
        raise BadReceiver(f"--alert: the URL of a {kind} receiver is not http:// or https:// with a host; {HOW}")
    if not allow_private:
        try:
            require_public(whole.host)
        except NotAllowed as error:
            raise BadReceiver(f"--alert: {error}") from error
    auth = (whole.username, whole.password) if whole.userinfo else None
    url = whole.copy_with(userinfo=b"", fragment=None)
    if kind == "pagerduty":
        return PagerDuty(url, whole.username)
    if kind == "slack":
        return Slack(url)
    if kind == "alertmanager":
        return Alertmanager(url.copy_with(path=f"{url.path.rstrip('/')}/api/v2/alerts"), auth)
    return Webhook(url, auth, secret)
