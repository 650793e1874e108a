"""HTTP requests with one deadline over the whole exchange and a bound on the body. No redirects, compression, proxy or
cookies. Every failure is an HttpFailed.

HTTP clients bound each read, so a server that sends a byte every two seconds holds a thread for ever. Here the deadline
covers connecting, the headers and the body; a look-up takes as long as the system's resolver lets it. A compressed
body is not read: it was not asked for, and a few kilobytes of nested gzip can become gigabytes. `Location` is not read.
"""

from __future__ import annotations

import functools
import http
import logging
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Self, TypeVar

import httpcore2
import msgspec

from . import limits
from .errors import KvscopeError
from .http_url import HttpUrl

Decoded = TypeVar("Decoded")
Resolve = Callable[[str, int], Sequence[str]]
"""From a host and a port to the addresses to connect to. Raises HttpFailed."""

# It logs each request with its path and its headers: a receiver's URL and a token are secrets.
logging.getLogger("httpcore2").setLevel(logging.WARNING)

IDLE_CONNECTION_S = 5.0
"""How long a connection is kept for the next exchange."""
MAX_CONNECTIONS = 100
OWN_HEADERS = {"user-agent": "kvscope", "accept-encoding": "identity"}


class HttpFailed(KvscopeError):
    """A request failed. The text goes on after the address ("did not answer within 5 s") and quotes nothing
    of an answer, which may be any server's secret.
    """


class HttpTimeout(HttpFailed):
    """The request did not finish by its deadline."""


class HttpAnswer(NamedTuple):
    """What a server answered, with any status. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return self.status // 100 == 2

    def decoded(self, expected: type[Decoded]) -> Decoded:
        """Decode the body, which is JSON of that type. Raises HttpFailed."""
        try:
            return msgspec.json.decode(self.body, type=expected)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise HttpFailed("answers with what is no JSON of the expected form") from None


class _Deadline(threading.local):
    at_s = float("inf")

    def left_s(self) -> float:
        left_s = self.at_s - time.monotonic()
        if left_s <= 0:
            raise httpcore2.ReadTimeout
        return left_s


class _BoundedStream(httpcore2.NetworkStream):
    """A connection whose every read and write ends by the deadline."""

    def __init__(self, stream: httpcore2.NetworkStream, deadline: _Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadline.left_s())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.left_s())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        tls = self._stream.start_tls(ssl_context, server_hostname, self._deadline.left_s())
        return _BoundedStream(tls, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _BoundedBackend(httpcore2.NetworkBackend):
    def __init__(self, deadline: _Deadline, resolve: Resolve) -> None:
        self._backend = httpcore2.SyncBackend()
        self._deadline = deadline
        self._resolve = resolve

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        *others, last = self._resolve(host, port)
        for address in others:
            try:
                return self._connected(address, port)
            except httpcore2.ConnectError:
                continue
        return self._connected(last, port)

    def _connected(self, address: str, port: int) -> httpcore2.NetworkStream:
        return _BoundedStream(self._backend.connect_tcp(address, port, self._deadline.left_s()), self._deadline)


def addresses_of(host: str, port: int) -> list[str]:
    """Look a host up. Raises HttpFailed for one that is not known."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise HttpFailed(f"was not found ({getattr(error, 'strerror', None) or 'no such name'})") from None
    return [str(entry[4][0]) for entry in found]


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """Return the context of all connections: to read the certificates takes longer than most exchanges."""
    return httpcore2.default_ssl_context()


class BoundedClient:
    """Asks HTTP servers. An exchange takes `deadline_s` at most, and a body has `max_bytes` at most; with 0, none is
    read. Thread-safe.

    headers: sent with every request. tls: whom to trust, if not the certificates of the system. resolve: looks hosts
    up, and decides which addresses may be connected to.
    """

    def __init__(
        self,
        deadline_s: float,
        max_bytes: int = limits.ANSWER_BYTES,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        resolve: Resolve = addresses_of,
    ) -> None:
        self._deadline_s = deadline_s
        self._max_bytes = max_bytes
        self._headers = OWN_HEADERS | _lower(headers)
        self._deadline = _Deadline()
        self._pool = httpcore2.ConnectionPool(
            tls or _tls_context(),
            max_connections=MAX_CONNECTIONS,
            keepalive_expiry=IDLE_CONNECTION_S,
            network_backend=_BoundedBackend(self._deadline, resolve),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect."""
        self._pool.close()

    def ask(
        self,
        method: str,
        url: HttpUrl,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        deadline_s: float = 0.0,
    ) -> HttpAnswer:
        """Send a request and return the answer, whatever its status. A user in the address is sent as basic
        authentication. deadline_s: of this exchange, if not that of the client. Raises HttpFailed, and nothing else.
        """
        deadline_s = deadline_s or self._deadline_s
        self._deadline.at_s = time.monotonic() + deadline_s
        try:
            sent = {"host": url.netloc, **_authorization(url), **self._headers, **_lower(headers)}
            if method != "GET":
                sent["content-length"] = str(len(body))
            request = httpcore2.Request(
                method,
                httpcore2.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target),
                headers=[*sent.items()],
                content=body,
                extensions={"timeout": {"pool": deadline_s}},
            )
            with closing(self._pool.handle_request(request)) as response:
                answered = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
                return HttpAnswer(response.status, answered, self._body(response, answered) if self._max_bytes else b"")
        except Exception as error:
            raise _failure(error, deadline_s) from None  # what it says may be of the answer

    def _body(self, response: httpcore2.Response, headers: Mapping[str, str]) -> bytes:
        if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
            raise HttpFailed("answers compressed, which was not asked for")
        body = bytearray()
        for chunk in response.iter_stream():
            body += chunk
            if len(body) > self._max_bytes:
                raise HttpFailed(f"answers with more than {self._max_bytes:,} bytes")
        return bytes(body)


def _lower(headers: Mapping[str, str] | None) -> dict[str, str]:
    return {name.lower(): value for name, value in (headers or {}).items()}


def _authorization(url: HttpUrl) -> dict[str, str]:
    if not (url.username or url.password):
        return {}
    return {"authorization": f"Basic {b64encode(f'{url.username}:{url.password}'.encode()).decode()}"}


def _failure(error: Exception, deadline_s: float) -> HttpFailed:
    """Return what an exception of an exchange comes to. Words of the operating system and of OpenSSL are repeated."""
    match error:
        case HttpFailed():
            return error
        case httpcore2.TimeoutException():
            return HttpTimeout(f"did not answer within {deadline_s:g} s")
        case httpcore2.NetworkError(args=[ssl.SSLCertVerificationError() as refused]):
            return HttpFailed(f"has a certificate that is not trusted ({refused.verify_message})")
        case httpcore2.NetworkError(args=[ssl.SSLError() as refused]):
            return HttpFailed(f"does not speak TLS as it should ({refused.reason})")
        case httpcore2.NetworkError(args=[OSError() as refused]):
            return HttpFailed(f"does not answer ({refused.strerror or type(refused).__name__})")
        case httpcore2.RemoteProtocolError():
            return HttpFailed("does not speak HTTP, or ended its answer early")
    return HttpFailed(f"cannot be asked ({type(error).__name__}): look for odd characters in the address and token")


def status_text(status: int) -> str:
    """Return a status with its standard name: that in an answer is whatever the server likes."""
    try:
        return f"{status} {http.HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
