"""The requests of `monitor alerts` to a running service, over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import httpx
import msgspec

from kvscope.monitor.alerting.alert_schema import AlertsView, TriedView
from kvscope.monitor.bounded_http import bounded_client
from kvscope.monitor.errors import Unreachable

AlertAnswer = TypeVar("AlertAnswer")

ALERTS_TIMEOUT_S = 60.0
"""A test waits for each receiver."""


class AlertsClient:
    """Asks the service at `url`. Raises Unreachable for one that does not answer, ValueError for what it refuses."""

    def __init__(self, url: str, token: str = "") -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def view(self) -> AlertsView:
        """Receivers, open alerts, silences, and the latest deliveries."""
        return self._ask("GET", "/api/alerts", AlertsView)

    def test(self, receiver: str = "") -> list[TriedView]:
        """Send a test to that receiver, or to all."""
        return self._ask("POST", "/api/alerts/test", list[TriedView], params={"receiver": receiver})

    def silence(self, matchers: Sequence[str], seconds: float, comment: str = "") -> int:
        """Send nothing about alerts that match, for that long. Return the silence's number."""
        asked = {"matchers": list(matchers), "seconds": seconds, "comment": comment}
        return self._ask("POST", "/api/alerts/silences", int, json=asked)

    def unsilence(self, number: int) -> None:
        """End a silence."""
        self._ask("DELETE", f"/api/alerts/silences/{number}", type(None))

    def replay(self, number: int) -> None:
        """Send a message of the delivery log again."""
        self._ask("POST", f"/api/alerts/deliveries/{number}/replay", type(None))

    def _ask(self, method: str, path: str, answer: type[AlertAnswer], **asked: Any) -> AlertAnswer:
        try:
            with bounded_client(ALERTS_TIMEOUT_S, headers=self._headers) as client:
                response = client.request(method, self._url + path, **asked)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreachable(
                f"{self._url} does not answer ({type(error).__name__}): is `monitor serve` running there?"
            ) from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise Unreachable(f"{self._url} wants a token: give it with --token or KVSCOPE_TOKEN")
        try:
            if response.status_code in (httpx.codes.BAD_REQUEST, httpx.codes.NOT_FOUND):
                raise ValueError(response.json()["detail"])
            response.raise_for_status()
            return msgspec.json.decode(response.content, type=answer)
        except (httpx.HTTPStatusError, msgspec.DecodeError) as error:
            raise Unreachable(f"{self._url} does not answer as a kvscope service does: {error}") from error
