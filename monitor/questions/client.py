"""The HTTP client of a kvscope service."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from ..base import limits
from ..base.bounded_http import BoundedClient, HttpAnswer, HttpFailed, status_text
from ..base.errors import BadQuestion, BadTime, NotKnown, Unreachable
from ..base.http_url import HttpUrl, address_of
from .query import Query, Question

REFUSALS = {"bad-time": BadTime, "bad-question": BadQuestion}
"""The exception for each value of the x-kvscope header."""


class ServiceClient(Query):
    """Asks a service at `url` (its base, such as http://127.0.0.1:8765). Raises BadTarget if that is not an address,
    and Unreachable if the service does not answer.
    """

    def __init__(self, url: str, token: str = "", timeout_s: float = 10.0) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._url = address_of(url.rstrip("/"))
        self._timeout_s = timeout_s
        self._client = BoundedClient(timeout_s, limits.SERVICE_ANSWER_BYTES, headers)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def answer(self, question: Question, arguments: Mapping[str, Any]) -> Any:
        """Send a question to its route and decode the answer."""
        parameters = {name: _in_url(value) for name, value in arguments.items() if value is not None}
        timeout_s = question.timeout_s or self._timeout_s
        try:
            answer = self._client.ask("GET", self._url.below(question.route, parameters), deadline_s=timeout_s)
            self._check(answer)
            return answer.decoded(question.answer)
        except HttpFailed as error:
            raise no_service(self._url, error) from error

    def _check(self, answer: HttpAnswer) -> None:
        """Raise what the service refused with. Raises Unreachable or HttpFailed for what no kvscope service answers."""
        kind = answer.headers.get("x-kvscope")
        if answer.status == HTTPStatus.UNAUTHORIZED:
            raise Unreachable(f"{self._url} wants a token: give it with --token or KVSCOPE_TOKEN")
        if answer.status == HTTPStatus.NOT_FOUND and kind == "not-known":
            raise NotKnown(answer.decoded(Refusal).detail)
        if answer.status == HTTPStatus.BAD_REQUEST and kind in REFUSALS:
            raise REFUSALS[kind](answer.decoded(Refusal).detail)
        if answer.status == HTTPStatus.GATEWAY_TIMEOUT and kind == "unreachable":
            raise Unreachable(answer.decoded(Refusal).detail)
        if not answer.is_success:
            raise Unreachable(
                f"{self._url} answers {status_text(answer.status)}, as no kvscope service does. If an"
                f" engine is there, give its metrics page: {self._url.below('/metrics')}"
            )


class Refusal(msgspec.Struct):
    """The body of a service's answer that is not 2xx."""

    detail: str


def no_service(url: HttpUrl, error: HttpFailed) -> Unreachable:
    """Return the exception for an exchange with a service that came to nothing."""
    return Unreachable(f"{url} {error}: is `monitor serve` running there?")


def _in_url(value: Any) -> Any:
    """Return a value as it stands in a query string. A sequence is joined by commas."""
    return ",".join(value) if isinstance(value, (list, tuple)) else value
