"""DNS names: the addresses of A and AAAA records, or the hosts and ports of SRV records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import dns.exception
import dns.rdatatype
import dns.resolver

from kvscope.monitor.discovery.discovery_config import DnsDiscovery
from kvscope.monitor.discovery.target_groups import (
    DiscoveryFailed,
    FoundTargets,
    address_text,
    labelled,
    read_as,
)

NAME_TIMEOUT_S: Final = 5.0
"""For one question, with what the resolver repeats."""


class DnsNames:
    """The targets that names stand for. A name that does not exist has no targets. A failed look-up is an error."""

    def __init__(self, config: DnsDiscovery) -> None:
        self._config = config

    def find(self) -> FoundTargets:
        """Return what the names stand for now. Raises DiscoveryFailed."""
        try:
            resolver = self._resolver()
        except (dns.exception.DNSException, OSError) as error:
            raise DiscoveryFailed(f"the system names no DNS server ({error}): set nameserver") from error
        addresses = [address for name in self._config.names for address in self._addresses(resolver, name)]
        return read_as(labelled(addresses, self._config.labels), self._config.name)

    def _resolver(self) -> dns.resolver.Resolver:
        """Return a resolver with the system's servers of now, which may change, or with the one that is named."""
        resolver = dns.resolver.Resolver(configure=not self._config.nameserver)
        if self._config.nameserver:
            host, _, port = self._config.nameserver.rpartition(":")
            resolver.nameservers, resolver.port = [host.strip("[]")], int(port)
        return resolver

    def _addresses(self, resolver: dns.resolver.Resolver, name: str) -> Iterator[str]:
        if self._config.type == "SRV":
            for record in self._answers(resolver, name, "SRV"):
                yield address_text(record.target.to_text(omit_final_dot=True), record.port)
        else:
            for kind in ("A", "AAAA"):
                for record in self._answers(resolver, name, kind):
                    yield address_text(record.address, self._config.port)

    def _answers(self, resolver: dns.resolver.Resolver, name: str, kind: str) -> Iterator[Any]:
        try:
            answer = resolver.resolve(name, kind, lifetime=NAME_TIMEOUT_S, raise_on_no_answer=False)
        except dns.resolver.NXDOMAIN:
            return
        except (dns.exception.DNSException, OSError) as error:
            raise DiscoveryFailed(f"the DNS gave no {kind} records of {name}: {error}") from error
        yield from answer.rrset or ()

    def close(self) -> None:
        """Nothing stays open."""
