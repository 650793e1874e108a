"""Prometheus's http_sd: a server that answers with target groups."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import httpx
import msgspec

from kvscope.monitor.bounded_http import BodyTooLong, bounded_client, describe_failure, status_text
from kvscope.monitor.discovery.discovery_config import HttpDiscovery
from kvscope.monitor.discovery.target_groups import DiscoveryFailed, FoundTargets, found_targets
from kvscope.monitor.events import limits
from kvscope.monitor.sources.exposition import address_of, shown

LIST_TIMEOUT_S: Final = 10.0
REFRESH_HEADER: Final = "X-Prometheus-Refresh-Interval-Seconds"


class TargetServer:
    """The targets that a server lists. Raises BadTarget for what is not an address."""

    def __init__(self, config: HttpDiscovery) -> None:
        self._config = config
        self._address = address_of(config.url)
        self._where = shown(config.url).partition("?")[0]
        self._client = bounded_client(LIST_TIMEOUT_S, limits.TARGET_LIST_BYTES)

    def find(self) -> FoundTargets:
        """Return what the server lists now. Raises DiscoveryFailed."""
        headers = {"accept": "application/json", REFRESH_HEADER: f"{self._config.refresh_s:g}"}
        if self._config.bearer_file:
            headers["authorization"] = f"Bearer {token_in(self._config.bearer_file)}"
        content = fetched(self._client, self._address, headers, self._where)
        try:
            document = msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DiscoveryFailed(f"{self._where} answers with what is no JSON: {error}") from error
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


def fetched(client: httpx.Client, address: httpx.URL, headers: dict[str, str], where: str) -> bytes:
    """Return the body of a successful answer. Raises DiscoveryFailed."""
    try:
        response = client.get(address, headers=headers)
    except httpx.TimeoutException as error:
        raise DiscoveryFailed(f"{where} did not answer within {LIST_TIMEOUT_S:g} s") from error
    except BodyTooLong as error:
        raise DiscoveryFailed(f"{where} answers with more than {limits.TARGET_LIST_BYTES >> 20} MiB") from error
    except httpx.HTTPError as error:
        raise DiscoveryFailed(f"{where} does not answer: {describe_failure(error)}") from error
    if response.status_code != httpx.codes.OK:
        raise DiscoveryFailed(f"{where} answers {status_text(response.status_code)}")
    return response.content
