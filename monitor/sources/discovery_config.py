"""Discoveries of a configuration file ([[file_sd]], [[http_sd]], [[dns]], [[kubernetes]]), and what they name.

A target is an address and labels, as in Prometheus's target groups. Its event stream is read if a label names one, else
its metrics page:

    __address__                    HOST:PORT, of the list `targets`
    kvscope_events                 the event stream: a port on the target's host, or an endpoint such as tcp://HOST:5757
    __meta_kvscope_events          the same, where labels of the discovery itself begin with __meta_
    __scheme__, __metrics_path__   of the metrics page, as in Prometheus (http, /metrics)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from ..base import limits
from ..base.errors import CannotTell
from ..base.http_url import shown
from .prometheus_history import seconds

ADDRESS: Final = "__address__"
EVENTS_LABELS: Final = ("kvscope_events", "__meta_kvscope_events")
_METRICS_PATH: Final = re.compile(r"/[\x21-\x7e]*")


class DiscoveryFailed(CannotTell):
    """A list of targets cannot be read now. The message names the reason and the remedy."""


class FoundTarget(NamedTuple):
    """A target to read: an event stream, or else a metrics page."""

    target: str
    is_stream: bool


class FoundTargets(NamedTuple):
    """The targets to read now, and why other entries of the list are left out."""

    targets: tuple[FoundTarget, ...]
    left_out: tuple[str, ...] = ()


class TargetGroup(msgspec.Struct, frozen=True):
    """Targets that share labels, as Prometheus has them in file_sd and http_sd."""

    targets: list[str]
    labels: dict[str, str] = {}


def found_targets(document: Any, labels: Mapping[str, str], where: str) -> FoundTargets:
    """Return what to read of a list of target groups. `labels` hold where a group has no such label.

    Raises DiscoveryFailed for what is no such list, and for more targets than a service reads.
    """
    try:
        groups = msgspec.convert(document, list[TargetGroup])
    except (msgspec.ValidationError, RecursionError) as error:
        raise DiscoveryFailed(
            f"{where} is not a list of target groups: {error}. One looks like"
            ' [{"targets": ["10.0.0.1:8000"], "labels": {}}]'
        ) from error
    every = ((address, {**labels, **group.labels}) for group in groups for address in group.targets)
    return read_as(every, where)


def read_as(targets: Iterable[tuple[str, Mapping[str, str]]], where: str) -> FoundTargets:
    """Return what to read of targets, each an address and its labels, without repetitions.

    One that names nothing to read is left out. Raises DiscoveryFailed for too many.
    """
    given = list(itertools.islice(targets, limits.SOURCES + 1))
    if len(given) > limits.SOURCES:
        raise DiscoveryFailed(
            f"{where} has more than {limits.SOURCES} targets: a service reads no more. Split the list between services"
        )
    found: dict[FoundTarget, None] = {}
    left_out: dict[str, None] = {}
    for address, labels in given:
        try:
            found[_read_as(address, labels, where)] = None
        except DiscoveryFailed as error:
            left_out[str(error)] = None
    return FoundTargets(tuple(found), tuple(left_out))


def _read_as(address: str, labels: Mapping[str, str], where: str) -> FoundTarget:
    host, port = _host_and_port(address)
    events = next((labels[name] for name in EVENTS_LABELS if labels.get(name)), "")
    if re.fullmatch(r"\d{1,5}", events) and 0 < int(events) < 65536 and host:
        return FoundTarget(f"tcp://{host}:{events}", True)
    if events.startswith(("tcp://", "ipc://")):
        return FoundTarget(events, True)
    if events:
        raise DiscoveryFailed(f"{where}: {EVENTS_LABELS[0]}={events!r} is not a port or endpoint (tcp://HOST:5757)")
    scheme, path = labels.get("__scheme__", "http"), labels.get("__metrics_path__", "/metrics")
    if not host or not port:
        raise DiscoveryFailed(f"{where}: {address!r} is no HOST:PORT")
    if scheme not in ("http", "https") or not _METRICS_PATH.fullmatch(path):
        raise DiscoveryFailed(f"{where}: {address}: {scheme}://…{path} is not an address of a metrics page")
    return FoundTarget(f"{scheme}://{host}:{port}{path}", False)


def _host_and_port(address: str) -> tuple[str, int]:
    """Return the host as it stands in a URL, and the port, 0 if there is none. Empty: it is not an address."""
    if not re.fullmatch(r"[A-Za-z0-9_.\-]+(:\d+)?|\[[0-9A-Fa-f:.%]+\](:\d+)?", address):
        return "", 0
    try:
        port = urlsplit(f"//{address}").port or 0
    except ValueError:
        return "", 0
    return re.sub(r":\d+$", "", address) if port else address, port


def address_text(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def labelled(addresses: Iterable[str], labels: Mapping[str, str]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield each address with these labels."""
    for address in addresses:
        yield address, labels


GONE_AFTER: Final = "2m"
"""So long a target that has left its list is still read. An engine that dies often leaves the list first, since its
readiness probe fails, and detectors and slow scrapes need time to find it dead. A list that flaps changes nothing.
"""


class Finder(Protocol):
    """Finds targets, over and over. One thread only. Subclass it."""

    def find(self) -> FoundTargets:
        """Return what to read now. Raises DiscoveryFailed."""
        ...

    def close(self) -> None:
        """Disconnect, if anything stays open."""
        return


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
        from .finders import FINDERS  # it brings parsers of YAML and of DNS

        return FINDERS[type(self)](self)


class FileDiscovery(DiscoveryConfig, frozen=True, kw_only=True):
    """Prometheus's file_sd: JSON or YAML files. `*` in a file's name stands for anything."""

    files: list[str]
    refresh: str = "1s"

    @property
    def name(self) -> str:
        """See DiscoveryConfig."""
        return f"file_sd {', '.join(self.files)}"


class HttpDiscovery(DiscoveryConfig, frozen=True, kw_only=True):
    """Prometheus's http_sd: a server that answers with JSON. bearer_file: holds a token to send."""

    url: str
    bearer_file: str = ""
    refresh: str = "1m"

    @property
    def name(self) -> str:
        """See DiscoveryConfig."""
        return f"http_sd {shown(self.url).partition('?')[0]}"


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
