"""What finds targets: files and servers with Prometheus's target groups, DNS names, and pods of Kubernetes.

Pods are those that a label selector matches, asked of the Kubernetes API (source: its reference, "list Pod", v1). That
needs the verb `list` on `pods` in the namespace. Annotations name what to read of a pod:

    kvscope.io/events   the port of the event stream; without it, the metrics page is read
    kvscope.io/port     the port of the metrics page (default: `port` of the configuration)
"""

from __future__ import annotations

import glob
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import quote

import dns.exception
import dns.rdatatype
import dns.resolver
import msgspec
import yaml

from ..base import limits
from ..base.bounded_http import BoundedClient, HttpFailed, status_text
from ..base.http_url import HttpUrl, address_of, shown
from .discovery_config import (
    EVENTS_LABELS,
    DiscoveryConfig,
    DiscoveryFailed,
    DnsDiscovery,
    FileDiscovery,
    Finder,
    FoundTargets,
    HttpDiscovery,
    KubernetesDiscovery,
    address_text,
    found_targets,
    labelled,
    read_as,
)

YAML_SUFFIXES: Final = (".yml", ".yaml")


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML without aliases: a few kilobytes of nested ones stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not read")
        return super().compose_node(parent, index)


class _ReadFile(NamedTuple):
    version: tuple[int, int, int]
    found: FoundTargets


class TargetFiles(Finder):
    """The targets of all files that the patterns match. A file is read when its time, size or inode changes."""

    def __init__(self, config: FileDiscovery) -> None:
        self._config = config
        self._read: dict[Path, _ReadFile] = {}

    def find(self) -> FoundTargets:
        """Return the targets of all files as they are now. Raises DiscoveryFailed if one cannot be read."""
        read: dict[Path, _ReadFile] = {}
        for pattern in self._config.files:
            paths = sorted(map(Path, glob.glob(pattern))) if glob.has_magic(pattern) else [Path(pattern)]
            for path in paths:
                read[path] = self._read_file(path)
        self._read = read
        targets = dict.fromkeys(target for each in read.values() for target in each.found.targets)
        return FoundTargets(tuple(targets), tuple(text for each in read.values() for text in each.found.left_out))

    def _read_file(self, path: Path) -> _ReadFile:
        try:
            status = path.stat()
            version = (status.st_mtime_ns, status.st_size, status.st_ino)
            if path in self._read and self._read[path].version == version:
                return self._read[path]
            with path.open("rb") as file:
                content = file.read(limits.TARGET_LIST_BYTES + 1)
        except OSError as error:
            raise DiscoveryFailed(f"{path} cannot be read: {error.strerror}") from error
        if len(content) > limits.TARGET_LIST_BYTES:
            raise DiscoveryFailed(f"{path} has more than {limits.TARGET_LIST_BYTES >> 20} MiB")
        try:
            is_yaml = path.suffix in YAML_SUFFIXES
            document = yaml.load(content, _PlainLoader) if is_yaml else msgspec.json.decode(content)
        except (yaml.YAMLError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            kind = "YAML" if is_yaml else "JSON"
            raise DiscoveryFailed(f"{path} is no {kind}: {' '.join(str(error).split())}") from error
        return _ReadFile(version, found_targets(document or [], self._config.labels, str(path)))


Listed = TypeVar("Listed")
LIST_TIMEOUT_S: Final = 10.0
REFRESH_HEADER: Final = "X-Prometheus-Refresh-Interval-Seconds"


class TargetServer(Finder):
    """The targets that a server lists. Raises BadTarget for what is not an address."""

    def __init__(self, config: HttpDiscovery) -> None:
        self._config = config
        self._address = address_of(config.url)
        self._where = shown(config.url).partition("?")[0]
        self._client = BoundedClient(LIST_TIMEOUT_S, limits.TARGET_LIST_BYTES)

    def find(self) -> FoundTargets:
        """Return what the server lists now. Raises DiscoveryFailed."""
        headers = {"accept": "application/json", REFRESH_HEADER: f"{self._config.refresh_s:g}"}
        if self._config.bearer_file:
            headers["authorization"] = f"Bearer {token_in(self._config.bearer_file)}"
        document = fetched(self._client, self._address, headers, self._where, Any)
        return found_targets(document, self._config.labels, self._where)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


def token_in(path: str) -> str:
    """Return the token in a file, which may change: it is read each time. Raises DiscoveryFailed."""
    try:
        with Path(path).open(encoding="ascii") as file:
            return file.read(limits.HEADER_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DiscoveryFailed(f"{path} cannot be read as a token: {error}") from error


def fetched(
    client: BoundedClient, address: HttpUrl, headers: dict[str, str], where: str, expected: type[Listed]
) -> Listed:
    """Return the list that a server answers with. Raises DiscoveryFailed."""
    try:
        answer = client.ask("GET", address, headers)
        if answer.status != HTTPStatus.OK:
            raise HttpFailed(f"answers {status_text(answer.status)}")
        return answer.decoded(expected)
    except HttpFailed as error:
        raise DiscoveryFailed(f"{where} {error}") from error


NAME_TIMEOUT_S: Final = 5.0
"""For one question, with what the resolver repeats."""


class DnsNames(Finder):
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


NAMESPACE_FILE: Final = "namespace"
"""Beside the token."""
PODS_PER_PAGE: Final = 200
NODE_VARIABLE: Final = "KVSCOPE_NODE"
EVENTS_ANNOTATION: Final = "kvscope.io/events"
PORT_ANNOTATION: Final = "kvscope.io/port"


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    annotations: dict[str, str] = {}
    deletion_timestamp: str | None = None


class _PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")


class _Pod(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    status: _PodStatus = _PodStatus()


class _ListMetadata(msgspec.Struct, frozen=True, rename={"continued": "continue"}):
    continued: str = ""


class _PodList(msgspec.Struct, frozen=True):
    items: list[_Pod] = []
    metadata: _ListMetadata = _ListMetadata()


class KubernetesPods(Finder):
    """The running pods that a selector matches. One that is being deleted is listed until it is gone.

    Raises BadTarget if `api` is not an address.
    """

    def __init__(self, config: KubernetesDiscovery) -> None:
        self._config = config
        self._configured_api = address_of(config.api) if config.api else None
        self._client: BoundedClient | None = None

    def find(self) -> FoundTargets:
        """Return what to read of the pods now. Raises DiscoveryFailed."""
        return read_as(self._targets(), self._config.name)

    def _targets(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        for pod in self._pods():
            if pod.status.phase != "Running" or not pod.status.pod_ip:
                continue
            annotations = pod.metadata.annotations
            port = annotations.get(PORT_ANNOTATION, str(self._config.port))
            events = annotations.get(EVENTS_ANNOTATION, "")
            own = {EVENTS_LABELS[-1]: events} if events else {}
            # An address that is none is left out by name: the owner of a pod writes its annotations.
            is_own = port.isdecimal() and (not events or events.isdecimal())
            address = address_text(pod.status.pod_ip, int(port)) if is_own else f"pod {pod.metadata.name}"
            yield address, {**self._config.labels, **own} if is_own else {}

    def _pods(self) -> Iterator[_Pod]:
        pods = self._api().below(f"/api/v1/namespaces/{quote(self._namespace(), safe='')}/pods")
        headers = {"accept": "application/json"}
        if self._config.token_file and Path(self._config.token_file).exists():
            headers["authorization"] = f"Bearer {token_in(self._config.token_file)}"
        continued = ""
        for _ in range(limits.SOURCES // PODS_PER_PAGE + 1):
            asked = {"labelSelector": self._config.selector, "limit": str(PODS_PER_PAGE)} | self._of_node()
            address = pods.below("", asked | ({"continue": continued} if continued else {}))
            page = fetched(self._connected(), address, headers, f"the Kubernetes API ({pods})", _PodList)
            yield from page.items
            continued = page.metadata.continued
            if not continued:
                return
        raise DiscoveryFailed(f"{self._config.name}: more than {limits.SOURCES} pods match: narrow the selector")

    def _of_node(self) -> dict[str, str]:
        if not self._config.own_node:
            return {}
        node = os.environ.get(NODE_VARIABLE, "")
        if not node:
            raise DiscoveryFailed(f"own_node needs {NODE_VARIABLE}: set it to the node's name (spec.nodeName)")
        return {"fieldSelector": f"spec.nodeName={node}"}

    def _api(self) -> HttpUrl:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if self._configured_api is not None:
            return self._configured_api
        if not host:
            raise DiscoveryFailed("this is not a pod of a cluster (KUBERNETES_SERVICE_HOST is not set): set api")
        return address_of(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")

    def _namespace(self) -> str:
        if self._config.namespace:
            return self._config.namespace
        return token_in(str(Path(self._config.token_file).with_name(NAMESPACE_FILE)))

    def _connected(self) -> BoundedClient:
        if self._client is None:
            context = None
            if Path(self._config.ca_file).exists():
                try:
                    context = ssl.create_default_context(cafile=self._config.ca_file)
                except OSError as error:
                    raise DiscoveryFailed(f"{self._config.ca_file} holds no certificates: {error.strerror}") from error
            self._client = BoundedClient(LIST_TIMEOUT_S, limits.TARGET_LIST_BYTES, tls=context)
        return self._client

    def close(self) -> None:
        """Disconnect."""
        if self._client is not None:
            self._client.close()


FINDERS: Final[Mapping[type[DiscoveryConfig], Callable[[Any], Finder]]] = {
    FileDiscovery: TargetFiles,
    HttpDiscovery: TargetServer,
    DnsDiscovery: DnsNames,
    KubernetesDiscovery: KubernetesPods,
}
"""What finds the targets of each kind of discovery."""
