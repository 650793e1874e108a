"""TLS of a connection to NATS, over files that change while it lasts."""

from __future__ import annotations

import ssl
from typing import Any

from kvscope.monitor.bus.bus_config import BusConfig


class RenewedContext(ssl.SSLContext):
    """Reads its files at each handshake, so that a renewed certificate needs no restart."""

    config: BusConfig

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """Begin a handshake. Raises ssl.SSLError and OSError for files that cannot be used."""
        self.read_files()
        return super().wrap_bio(*arguments, **named)

    def read_files(self) -> None:
        """Read the authority, and this agent's certificate and key. Raises ssl.SSLError and OSError."""
        if self.config.tls_ca is None:
            self.load_default_certs()
        else:
            self.load_verify_locations(self.config.tls_ca)
        if self.config.tls_cert is not None:
            self.load_cert_chain(self.config.tls_cert, self.config.tls_key)


def tls_context(config: BusConfig) -> ssl.SSLContext:
    """Return the context of a configuration. Raises ValueError for files that cannot be used."""
    context = RenewedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.config = config
    try:
        context.read_files()
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"--nats-ca, --nats-cert or --nats-key cannot be used: {error}") from error
    return context
