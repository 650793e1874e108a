"""Receivers of other distributions, by the entry points of the group `kvscope.receivers`, contained.

The name of the entry point is the URL's scheme, alone or before +http(s): acme://HOST/PATH, acme+https://HOST/PATH. Its
object is called with the URL and returns a Receiver.
"""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar, Final

import httpx

from kvscope.monitor import plugins
from kvscope.monitor.alerting.addresses import NotAllowed, require_public
from kvscope.monitor.alerting.message import Message
from kvscope.monitor.alerting.receivers.receiver import BadReceiver, Post, Receiver, ReceiverFailed

RECEIVER_DEADLINE_S: Final = 10.0
"""How long a plug-in may take to make a receiver, or to format a message."""


class PluginReceiver(Receiver):
    """The receiver that `plugin` makes of `text`. Raises BadReceiver if it does not make one."""

    kind: ClassVar[str] = "plug-in"

    def __init__(self, plugin: plugins.Plugin, text: str, allow_private: bool) -> None:
        self._plugin = plugin
        try:
            receiver = plugins.call_within(RECEIVER_DEADLINE_S, lambda: plugin.target(text))
            if not isinstance(receiver, Receiver) or not isinstance(receiver.url, httpx.URL):
                raise TypeError("it made no Receiver with a URL")
            if not allow_private:
                require_public(receiver.url.host)
        except NotAllowed as error:
            raise BadReceiver(f"--alert: {error}") from error
        except Exception as error:
            plugins.report_failure(plugin, error)
            raise BadReceiver(
                f"--alert: the plug-in {plugin.distribution} cannot make a receiver: {type(error).__name__}"
            ) from None
        self._receiver: Receiver = receiver
        self.url, self.auth, self.name = receiver.url, receiver.auth, receiver.name
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
