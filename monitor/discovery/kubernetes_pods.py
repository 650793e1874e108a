"""Pods that a label selector matches, asked of the Kubernetes API. Source: the API reference, "list Pod", v1.

Needs the verb `list` on `pods` in the namespace. Annotations name what to read of a pod:

    kvscope.io/events   the port of the event stream; without it, the metrics page is read
    kvscope.io/port     the port of the metrics page (default: `port` of the configuration)
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import httpx
import msgspec

from kvscope.monitor.bounded_http import bounded_client
from kvscope.monitor.discovery.discovery_config import KubernetesDiscovery
from kvscope.monitor.discovery.http_sd import LIST_TIMEOUT_S, fetched, token_in
from kvscope.monitor.discovery.target_groups import (
    EVENTS_LABELS,
    DiscoveryFailed,
    FoundTargets,
    address_text,
    read_as,
)
from kvscope.monitor.events import limits

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


class KubernetesPods:
    """The running pods that a selector matches. One that is being deleted is listed until it is gone."""

    def __init__(self, config: KubernetesDiscovery) -> None:
        self._config = config
        self._client: httpx.Client | None = None

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
        api = self._api()
        pods = f"{api}/api/v1/namespaces/{self._namespace()}/pods"
        headers = {"accept": "application/json"}
        if self._config.token_file and Path(self._config.token_file).exists():
            headers["authorization"] = f"Bearer {token_in(self._config.token_file)}"
        continued = ""
        for _ in range(limits.SOURCES // PODS_PER_PAGE + 1):
            asked = {"labelSelector": self._config.selector, "limit": str(PODS_PER_PAGE)} | self._of_node()
            address = httpx.URL(pods, params=asked | ({"continue": continued} if continued else {}))
            content = fetched(self._connected(), address, headers, f"the Kubernetes API ({pods})")
            try:
                page = msgspec.json.decode(content, type=_PodList)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise DiscoveryFailed(f"{pods} answers with what is not a list of pods: {error}") from error
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

    def _api(self) -> str:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not self._config.api and not host:
            raise DiscoveryFailed("this is not a pod of a cluster (KUBERNETES_SERVICE_HOST is not set): set api")
        return self._config.api.rstrip("/") or f"https://{address_text(host, int(port))}"

    def _namespace(self) -> str:
        if self._config.namespace:
            return self._config.namespace
        return token_in(str(Path(self._config.token_file).with_name(NAMESPACE_FILE)))

    def _connected(self) -> httpx.Client:
        if self._client is None:
            context = None
            if Path(self._config.ca_file).exists():
                context = ssl.create_default_context(cafile=self._config.ca_file)
            self._client = bounded_client(LIST_TIMEOUT_S, limits.TARGET_LIST_BYTES, tls=context)
        return self._client

    def close(self) -> None:
        """Disconnect."""
        if self._client is not None:
            self._client.close()
