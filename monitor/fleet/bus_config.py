"""The settings that `--nats` and its companions give, checked before anything connects."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from .bus_subjects import ANY, BusRole

TENANT_PATTERN: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
MAX_AGENT_CHARS: Final = 200


@dataclass(frozen=True)
class BusConfig:
    """Where NATS is and who this agent is. Raises ValueError that names the flag and the remedy.

    urls: servers of one cluster. role: whose credentials these are (`monitor bus permissions`). credentials: a .creds
    file, or a file with an nkey seed. share: process only the engines whose lease this agent holds. zone, node: where
    its engines are, if that is known. service, kv_role: the service that they belong to, and their side of it.
    """

    urls: tuple[str, ...]
    tenant: str = "default"
    agent: str = field(default_factory=socket.gethostname)
    credentials: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    share: bool = False
    zone: str = ""
    node: str = ""
    service: str = ""
    kv_role: str = ""
    role: BusRole = "agent"

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("--nats names no server: give --nats nats://127.0.0.1:4222")
        for url in self.urls:
            _check_url(url, has_identity=self.credentials is not None or self.tls_cert is not None)
        if not TENANT_PATTERN.fullmatch(self.tenant):
            raise ValueError(
                f"--nats-tenant {self.tenant!r} is not a tenant's name: use 1 to 32 of a-z, 0-9 and -, such as team-a"
            )
        if not self.agent or self.agent == ANY or len(self.agent) > MAX_AGENT_CHARS or not self.agent.isprintable():
            raise ValueError(
                f"--nats-agent is not a name: use 1 to {MAX_AGENT_CHARS} printable characters, and not {ANY}"
            )
        for flag, text in (("--zone", self.zone), ("--node", self.node), ("--service", self.service)):
            if len(text) > MAX_AGENT_CHARS or not (text.isprintable()):
                raise ValueError(f"{flag} is not a name: use up to {MAX_AGENT_CHARS} printable characters")
        if self.kv_role not in ("", "producer", "consumer"):
            raise ValueError(f"--kv-role {self.kv_role!r} is not a side of a service: use producer or consumer")
        for flag, path in (
            ("--nats-creds", self.credentials),
            ("--nats-ca", self.tls_ca),
            ("--nats-cert", self.tls_cert),
            ("--nats-key", self.tls_key),
        ):
            if path is not None and not path.is_file():
                raise ValueError(f"{flag} {path} is not a file: name one that this user can read")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--nats-cert and --nats-key belong together: give both")


def bus_config(value: Callable[[str], Any], role: BusRole = "agent", *, share: bool = False, **place: str) -> BusConfig:
    """Return the configuration that settings ask for. `value` returns one by its key. `place`: zone, node, service and
    role.

    Raises ValueError.
    """
    return BusConfig(
        urls=tuple(value("nats")),
        tenant=value("nats_tenant"),
        agent=value("nats_agent") or socket.gethostname(),
        credentials=value("nats_creds"),
        tls_ca=value("nats_ca"),
        tls_cert=value("nats_cert"),
        tls_key=value("nats_key"),
        share=share,
        role=role,
        **place,
    )


def _check_url(url: str, *, has_identity: bool) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("nats", "tls") or not parts.hostname:
        raise ValueError(f"--nats {url} is no NATS server: one looks like nats://127.0.0.1:4222 or tls://nats:4222")
    if parts.username or parts.password:
        raise ValueError(
            f"--nats {parts.scheme}://…@{parts.hostname}: other users can read a command line. Put the credentials in a"
            " file, and name it with --nats-creds"
        )
    is_local = parts.hostname in ("localhost", "::1") or parts.hostname.startswith("127.")
    if not is_local and (parts.scheme != "tls" or not has_identity):
        raise ValueError(
            f"--nats {url} is on another machine: use tls:// with --nats-creds FILE, or with --nats-cert and --nats-key"
        )
