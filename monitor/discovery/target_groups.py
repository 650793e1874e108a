"""Prometheus's target groups, and how the labels of a target name what to read of it.

A target is an address and labels. Its event stream is read if a label names one, else its metrics page:

    __address__                    HOST:PORT, of the list `targets`
    kvscope_events                 the event stream: a port on the target's host, or an endpoint such as tcp://HOST:5757
    __meta_kvscope_events          the same, where labels of the discovery itself begin with __meta_
    __scheme__, __metrics_path__   of the metrics page, as in Prometheus (http, /metrics)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvscope.monitor.errors import CannotTell
from kvscope.monitor.events import limits

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
