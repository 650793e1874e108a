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
    """The targets that names stand for. A name that is not there has no targets; one that cannot be asked fails."""

    def __init__(self, config: DnsDiscovery) -> None:
        self._config = config
        self._resolver = dns.resolver.Resolver(configure=not config.nameserver)
        if config.nameserver:
            host, _, port = config.nameserver.rpartition(":")
            self._resolver.nameservers = [host.strip("[]")]
            self._resolver.port = int(port)

    def find(self) -> FoundTargets:
        """Return what the names stand for now. Raises DiscoveryFailed."""
        addresses = [address for name in self._config.names for address in self._addresses(name)]
        return read_as(labelled(addresses, self._config.labels), self._config.name)

    def _addresses(self, name: str) -> Iterator[str]:
        if self._config.type == "SRV":
            for record in self._answers(name, "SRV"):
                yield address_text(record.target.to_text(omit_final_dot=True), record.port)
        else:
            for kind in ("A", "AAAA"):
                for record in self._answers(name, kind):
                    yield address_text(record.address, self._config.port)

    def _answers(self, name: str, kind: str) -> Iterator[Any]:
        try:
            answer = self._resolver.resolve(name, kind, lifetime=NAME_TIMEOUT_S, raise_on_no_answer=False)
        except dns.resolver.NXDOMAIN:
            return
        except dns.exception.DNSException as error:
            raise DiscoveryFailed(f"the DNS gave no {kind} records of {name}: {error}") from error
        yield from answer.rrset or ()

    def close(self) -> None:
        """Nothing stays open."""
