"""Addresses of HTTP servers, checked as they are read: a host that no look-up takes is refused here, by name."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import quote, unquote, urlencode, urlsplit

from .errors import BadTarget, KvscopeError

PORTS: Final = {"http": 80, "https": 443}
HOST_NAME: Final = re.compile(r"(?!.{254})(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}\.?")
AS_GIVEN: Final = "!#$%&'()*+,/:;=?@[]{}|~"
"""Punctuation of a path or a query that is sent as it was given; `%` begins what is encoded already."""


class BadUrl(KvscopeError, ValueError):
    """The text is not the address of an HTTP server. The message names the reason and repeats nothing of the text,
    which may be a secret.
    """


class HttpUrl(NamedTuple):
    """The address of an HTTP server. Its text has no user and no password."""

    scheme: str
    host: str
    """A name in ASCII or an IP address, without brackets."""
    port: int
    path: str = ""
    query: str = ""
    username: str = ""
    password: str = ""

    @property
    def netloc(self) -> str:
        """HOST:PORT as in a Host header: without the port that the scheme implies."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def target(self) -> str:
        """The path and the query, as in a request."""
        return f"{self.path or '/'}?{self.query}" if self.query else self.path or "/"

    def below(self, path: str, parameters: Mapping[str, object] | None = None) -> HttpUrl:
        """Return the address of `path` below this one, with these parameters as its query."""
        return self._replace(path=f"{self.path.rstrip('/')}{path}", query=urlencode(parameters or {}))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.path}{f'?{self.query}' if self.query else ''}"

    def __repr__(self) -> str:
        return str(self)


def http_url(text: str) -> HttpUrl:
    """Parse an address. Raises BadUrl."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise BadUrl("its host or its port is malformed: a port is a number from 1 to 65535") from error
    if parts.scheme not in PORTS or not parts.hostname or not text.isprintable():
        raise BadUrl("one looks like http://127.0.0.1:8000")
    if not _is_host(parts.hostname, is_bracketed="[" in parts.netloc.rpartition("@")[2]):
        raise BadUrl(
            "its host is neither an IP address nor a name, whose parts are 1 to 63 letters, digits, - and _, with one"
            " dot between them. A name with other letters has a form with these alone, which begins with xn--"
        )
    if port == 0:
        raise BadUrl("a port is a number from 1 to 65535")
    return HttpUrl(
        parts.scheme,
        parts.hostname,
        port or PORTS[parts.scheme],
        quote(parts.path, safe=AS_GIVEN),
        quote(parts.query, safe=AS_GIVEN),
        unquote(parts.username or ""),
        unquote(parts.password or ""),
    )


def _is_host(host: str, *, is_bracketed: bool) -> bool:
    if not is_bracketed:
        return HOST_NAME.fullmatch(host) is not None
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return host.isascii()


def shown(url: str) -> str:
    """Return the address without its secrets."""
    return re.sub(r"//[^/]*@", "//", url)


def address_of(url: str) -> HttpUrl:
    """Return the address that a target is. Raises BadTarget, which names it without its secrets."""
    try:
        return http_url(url)
    except BadUrl as error:
        raise BadTarget(f"{shown(url)} is not an address: {error}") from error
