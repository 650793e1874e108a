"""Which addresses alerts may be sent to: public ones, and private ones only where that was allowed."""

from __future__ import annotations

import ipaddress
import socket

from kvscope.monitor.errors import KvscopeError


class NotAllowed(KvscopeError):
    """A host is, or resolves to, an address that must not receive alerts. The message names the setting that allows
    it.
    """


def is_public(address: str) -> bool:
    """Whether an IP address is public. An IPv4 address within an IPv6 one counts as itself."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return parsed.is_global and not parsed.is_multicast


def public_address_of(host: str, port: int, allow_private: bool) -> str:
    """Return the address to connect to. A single look-up decides, so that a name cannot resolve to a public address for
    the check and to a private one for the call. Raises NotAllowed, and OSError for a name that is not known.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    if not allow_private:
        for address in addresses:
            if not is_public(address):
                raise NotAllowed(f"{host} is at the private address {address}: --alert-private allows that")
    return addresses[0]


def require_public(host: str) -> None:
    """Refuse a host that is private without a look-up: an address written out, or localhost. Raises NotAllowed."""
    if host == "localhost" or host.endswith(".localhost"):
        raise NotAllowed(f"{host} is this machine: --alert-private allows that")
    try:
        public = is_public(host)
    except ValueError:
        return  # a name, which is looked up at each try
    if not public:
        raise NotAllowed(f"{host} is a private address: --alert-private allows that")
