"""The HTTP client of a kvscope service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from kvscope.monitor.bounded_http import bounded_client, status_text
from kvscope.monitor.errors import BadQuestion, BadTime, NotKnown, Unreachable
from kvscope.monitor.events import limits
from kvscope.monitor.query import Query, Question

REFUSALS = {"bad-time": BadTime, "bad-question": BadQuestion}
"""The exception for each value of the x-kvscope header."""


class ServiceClient(Query):
    """Asks a service at `url` (its base, such as http://127.0.0.1:8765). Raises Unreachable if it does not answer."""

    def __init__(self, url: str, token: str = "", timeout_s: float = 10.0) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._client = bounded_client(timeout_s, limits.SERVICE_ANSWER_BYTES, headers, base_url=self.url)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def answer(self, question: Question, arguments: Mapping[str, Any]) -> Any:
        """Send a question to its route and decode the answer."""
        parameters = {name: _in_url(value) for name, value in arguments.items() if value is not None}
        timeout_s = question.timeout_s or self._timeout_s
        try:
            response = self._client.get(question.route, params=parameters, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise Unreachable(
                f"{self.url} does not answer ({type(error).__name__}): is `monitor serve` running there?"
            ) from error
        self._check(response)
        try:
            return msgspec.json.decode(response.content, type=question.answer)
        except msgspec.DecodeError as error:
            raise Unreachable(f"{self.url} does not answer as a kvscope service of this release does") from error

    def _check(self, response: httpx.Response) -> None:
        """Raise what the service refused with. Raises Unreachable for what no kvscope service answers."""
        kind = response.headers.get("x-kvscope")
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise Unreachable(f"{self.url} wants a token: give it with --token or KVSCOPE_TOKEN")
        if response.status_code == httpx.codes.NOT_FOUND and kind == "not-known":
            raise NotKnown(response.json()["detail"])
        if response.status_code == httpx.codes.BAD_REQUEST and kind in REFUSALS:
            raise REFUSALS[kind](response.json()["detail"])
        if response.status_code == httpx.codes.GATEWAY_TIMEOUT and kind == "unreachable":
            raise Unreachable(response.json()["detail"])
        if not response.is_success:
            raise Unreachable(
                f"{self.url} answers {status_text(response.status_code)}, as no kvscope service does. If an"
                f" engine is there, give its metrics page: {self.url}/metrics"
            )


def _in_url(value: Any) -> Any:
    """Return a value as it stands in a query string. A sequence is joined by commas."""
    return ",".join(value) if isinstance(value, (list, tuple)) else value
