"""The discovery blocks of a configuration file: [[file_sd]], [[http_sd]], [[dns]] and [[kubernetes]]."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, Protocol

import msgspec

from kvscope.monitor.discovery.target_groups import FoundTargets
from kvscope.monitor.sources.prometheus_history import seconds

GONE_AFTER: Final = "2m"
"""So long a target that has left its list is still read. An engine that dies often leaves the list first, since its
readiness probe fails, and detectors and slow scrapes need time to find it dead. A list that flaps changes nothing.
"""


class Finder(Protocol):
    """Finds targets, over and over. One thread only."""

    def find(self) -> FoundTargets:
        """Return what to read now. Raises DiscoveryFailed."""
        ...

    def close(self) -> None:
        """Disconnect."""
        ...


class DiscoveryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shared fields of every discovery. labels: of all its targets, where they have none of that name.

    refresh: between two lists. gone_after: how long a target is read that the list has no more.
    """

    labels: dict[str, str] = {}
    refresh: str = "30s"
    gone_after: str = GONE_AFTER

    def __post_init__(self) -> None:
        """Raise ValueError for a time that is none, or too short to poll a server."""
        if seconds(self.refresh) < 1:
            raise ValueError("refresh is 1s or more")
        seconds(self.gone_after)

    @property
    def refresh_s(self) -> float:
        """Seconds between two lists."""
        return float(seconds(self.refresh))

    @property
    def gone_after_s(self) -> float:
        """Seconds for which a target is read that the list has no more."""
        return float(seconds(self.gone_after))

    @property
    def name(self) -> str:
        """The name that it is reported by, without secrets."""
        raise NotImplementedError

    def finder(self) -> Finder:
        """Return what finds its targets."""
        raise NotImplementedError


class FileDiscovery(DiscoveryConfig, frozen=True, kw_only=True):
    """Prometheus's file_sd: JSON or YAML files. `*` in a file's name stands for anything."""

    files: list[str]
    refresh: str = "1s"

    @property
    def name(self) -> str:
        """See DiscoveryConfig."""
        return f"file_sd {', '.join(self.files)}"

    def finder(self) -> Finder:
        """See DiscoveryConfig."""
        from kvscope.monitor.discovery.file_sd import TargetFiles

        return TargetFiles(self)


class HttpDiscovery(DiscoveryConfig, frozen=True, kw_only=True):
    """Prometheus's http_sd: a server that answers with JSON. bearer_file: holds a token to send."""

    url: str
    bearer_file: str = ""
    refresh: str = "1m"

    @property
    def name(self) -> str:
        """See DiscoveryConfig."""
        from kvscope.monitor.sources.exposition import shown

        return f"http_sd {shown(self.url).partition('?')[0]}"

    def finder(self) -> Finder:
        """See DiscoveryConfig."""
        from kvscope.monitor.discovery.http_sd import TargetServer

        return TargetServer(self)


class DnsDiscovery(DiscoveryConfig, frozen=True, kw_only=True):
    """DNS names. type: A asks for A and AAAA and needs a port, SRV brings ports. nameserver: HOST:PORT to ask."""

    names: list[str]
    type: Literal["A", "SRV"] = "SRV"
    port: int = 0
    nameserver: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for addresses without a port."""
        super().__post_init__()
        match = re.fullmatch(r"(?:\d+(?:\.\d+){3}|\[[0-9A-Fa-f:]+\]):(\d{1,5})", self.nameserver)
        if self.nameserver and (match is None or not 0 < int(match[1]) < 65536):
            raise ValueError("nameserver is IP:PORT, such as 10.0.0.10:53")
        if self.type == "A" and not 0 < self.port < 65536:
            raise ValueError("type A needs a port from 1 to 65535: names have none")

    @property
    def name(self) -> str:
        """See DiscoveryConfig."""
        return f"dns {', '.join(self.names)}"

    def finder(self) -> Finder:
        """See DiscoveryConfig."""
        from kvscope.monitor.discovery.dns_names import DnsNames

        return DnsNames(self)


class KubernetesDiscovery(DiscoveryConfig, frozen=True, kw_only=True):
    """Pods that a label selector matches, asked of the Kubernetes API with the pod's own service account.

    port: of the metrics page, where the pod has no annotation kvscope.io/port. namespace: the pod's own if empty.
    own_node: only pods of the node that KVSCOPE_NODE names. api, token_file, ca_file: outside of a cluster.
    """

    selector: str
    namespace: str = ""
    own_node: bool = False
    port: int = 8000
    api: str = ""
    token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    ca_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"

    @property
    def name(self) -> str:
        """See DiscoveryConfig."""
        return f"kubernetes {self.namespace or 'own namespace'} {self.selector}"

    def finder(self) -> Finder:
        """See DiscoveryConfig."""
        from kvscope.monitor.discovery.kubernetes_pods import KubernetesPods

        return KubernetesPods(self)


DISCOVERIES: Final[Mapping[str, type[DiscoveryConfig]]] = {
    "file_sd": FileDiscovery,
    "http_sd": HttpDiscovery,
    "dns": DnsDiscovery,
    "kubernetes": KubernetesDiscovery,
}
"""The tables of a configuration file that name discoveries."""


def discovery_of(table: str, block: Any) -> DiscoveryConfig:
    """Return the discovery of a block of a configuration file. Raises ValueError, which names the error."""
    try:
        return msgspec.convert(block, DISCOVERIES[table])
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
