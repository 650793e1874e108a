"""HTTP exchanges that end: one deadline over all of an exchange, a bound on its body, no redirects, no compression.

httpx bounds each read, so a server that sends a byte every two seconds holds a thread for ever. Here the deadline
covers connecting, the headers and the body. A compressed body is not read: it was not asked for, and a few kilobytes of
nested gzip can become gigabytes.
"""

from __future__ import annotations

import functools
import http
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpcore
import httpx

from kvscope.monitor.events import limits


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """Return the context of all connections: to read the certificates takes longer than most exchanges."""
    return httpx.create_ssl_context(trust_env=False)


class BodyTooLong(httpx.HTTPError):
    """The body of an answer is beyond its bound."""


class CompressedBody(httpx.HTTPError):
    """The body of an answer is compressed, though that was not asked for."""


class _Deadline(threading.local):
    at_s = float("inf")

    def left(self, timeout_s: float | None, error: type[Exception]) -> float:
        """Return the lesser of a timeout and of what is left. Raises `error` if nothing is."""
        left_s = self.at_s - time.monotonic()
        if left_s <= 0:
            raise error("the exchange took longer than is allowed for all of it")
        return left_s if timeout_s is None else min(timeout_s, left_s)


class _BoundedStream(httpcore.NetworkStream):
    """A connection whose every read and write ends by the deadline."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: _Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadline.left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.left(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left_s = self._deadline.left(timeout, httpcore.ConnectTimeout)
        return _BoundedStream(self._stream.start_tls(ssl_context, server_hostname, left_s), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _BoundedBackend(httpcore.NetworkBackend):
    def __init__(self, deadline: _Deadline) -> None:
        self._backend = httpcore.SyncBackend()
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        left_s = self._deadline.left(timeout, httpcore.ConnectTimeout)
        return _BoundedStream(
            self._backend.connect_tcp(host, port, left_s, local_address, socket_options),
            self._deadline,
        )


class _BoundedBody(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, encoding: str, max_bytes: int) -> None:
        self._stream = stream
        self._encoding = encoding
        self._max_bytes = max_bytes

    def __iter__(self) -> Iterator[bytes]:
        if self._encoding not in ("", "identity"):
            raise CompressedBody(f"the answer is compressed ({self._encoding[:40]}), which was not asked for")
        taken = 0
        for chunk in self._stream:
            taken += len(chunk)
            if taken > self._max_bytes:
                raise BodyTooLong(f"the answer has more than {self._max_bytes:,} bytes")
            yield chunk

    def close(self) -> None:
        self._stream.close()


class BoundedTransport(httpx.BaseTransport):
    """A transport whose exchanges take `deadline_s` at most, and whose answers have `max_bytes` at most.

    A request with a timeout of its own, as httpx has it, takes that at most. Beyond that it raises
    httpx.TimeoutException, BodyTooLong or CompressedBody.
    """

    def __init__(self, deadline_s: float, max_bytes: int, tls: ssl.SSLContext | None = None) -> None:
        self._deadline_s = deadline_s
        self._max_bytes = max_bytes
        self._deadline = _Deadline()
        self._transport = httpx.HTTPTransport(verify=tls or _tls_context(), trust_env=False)
        self._transport._pool._network_backend = _BoundedBackend(self._deadline)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request. The deadline begins now, and covers reading the body."""
        request.headers["Accept-Encoding"] = "identity"
        timeout_s = request.extensions.get("timeout", {}).get("read")
        self._deadline.at_s = time.monotonic() + (timeout_s or self._deadline_s)
        response = self._transport.handle_request(request)
        encoding = response.headers.get("Content-Encoding", "").strip().lower()
        assert isinstance(response.stream, httpx.SyncByteStream)
        return httpx.Response(
            response.status_code,
            headers=response.headers,
            stream=_BoundedBody(response.stream, encoding, self._max_bytes),
            extensions=response.extensions,
        )

    def close(self) -> None:
        """Disconnect."""
        self._transport.close()


def describe_failure(error: httpx.HTTPError) -> str:
    """Describe why an exchange failed without a word of what was fetched, which may be any server's secret."""
    if isinstance(error, httpx.ProtocolError | httpx.DecodingError):
        return "what answers there does not speak HTTP"
    return str(error)


def status_text(status: int) -> str:
    """Return a status with its standard name: that in an answer is whatever the server likes."""
    try:
        return f"{status} {http.HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def bounded_client(
    deadline_s: float,
    max_bytes: int = limits.ANSWER_BYTES,
    headers: dict[str, str] | None = None,
    base_url: str = "",
    tls: ssl.SSLContext | None = None,
) -> httpx.Client:
    """Return a client of that transport, which follows no redirect and reads no proxy from the environment."""
    return httpx.Client(
        transport=BoundedTransport(deadline_s, max_bytes, tls),
        timeout=deadline_s,
        headers=headers,
        base_url=base_url,
        trust_env=False,
        follow_redirects=False,
    )
