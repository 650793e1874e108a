"""Certificates and JWTs as an operator of NATS issues them."""

from __future__ import annotations

import base64
import json
import os
import time
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import nkeys
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


class Authority:
    """An authority whose certificate is at `path`. It issues certificates as NAME.crt and NAME.key beside it."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.path = folder / f"{name}.crt"
        constraint = x509.BasicConstraints(ca=True, path_length=None)
        certificate = self._unsigned(self._name, self._key, 365.0).add_extension(constraint, critical=True)
        self.path.write_bytes(certificate.sign(self._key, SHA256()).public_bytes(Encoding.PEM))

    def _unsigned(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: float) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=30))
            .not_valid_after(now + timedelta(days=days))
        )

    def issue(self, name: str, *addresses: str, days: float = 90.0) -> tuple[Path, Path]:
        """A certificate and its key, valid for so many days; it has expired if they are negative."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._unsigned(subject, key, days)
        if addresses:
            names = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address(each)) for each in addresses])
            builder = builder.add_extension(names, critical=False)
        certificate, private = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        certificate.write_bytes(builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM))
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return certificate, private


def server_tls(authority: Authority, name: str, *addresses: str, days: float = 90.0) -> str:
    """A `tls` block of nats-server that asks clients for certificates of the authority."""
    certificate, key = authority.issue(name, *addresses, days=days)
    return f'tls {{ cert_file: "{certificate}", key_file: "{key}", ca_file: "{authority.path}", verify: true }}'


class Operator:
    """An operator with a system account and an account for each tenant."""

    def __init__(self, folder: Path, *tenants: str) -> None:
        self._folder = folder
        self._operator = _pair(nkeys.PREFIX_BYTE_OPERATOR)
        self._accounts = {name: _pair(nkeys.PREFIX_BYTE_ACCOUNT) for name in ("system", *tenants)}

    def settings(self) -> str:
        """What nats-server needs to trust this operator."""
        limits = dict.fromkeys(("subs", "data", "payload", "conn", "leaf", "imports", "exports"), -1)
        stored = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
        accounts = {
            _public(pair): self._signed(
                self._operator,
                _public(pair),
                name,
                {"type": "account", "limits": limits | (stored if name != "system" else {})},
            )
            for name, pair in self._accounts.items()
        }
        system = _public(self._accounts["system"])
        operator = self._signed(
            self._operator, _public(self._operator), "operator", {"type": "operator", "system_account": system}
        )
        preload = "\n".join(f"{public}: {token}" for public, token in accounts.items())
        return f"operator: {operator}\nresolver: MEMORY\nresolver_preload: {{\n{preload}\n}}\n"

    def credentials(self, tenant: str, user: str, allowed: dict[str, Any] | None = None, seconds: float = 0.0) -> Path:
        """A .creds file of a user; `allowed` are its permissions, `seconds` how long it is valid (0: for good)."""
        pair = _pair(nkeys.PREFIX_BYTE_USER)
        claims: dict[str, Any] = {"type": "user", "subs": -1, "data": -1, "payload": -1}
        if allowed is not None:
            claims |= {"pub": {"allow": allowed["publish"]}, "sub": {"allow": allowed["subscribe"]}}
        token = self._signed(self._accounts[tenant], _public(pair), user, claims, seconds)
        path = self._folder / f"{user}.creds"
        path.write_text(
            f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{pair.seed.decode()}\n------END USER NKEY SEED------\n"
        )
        return path

    def _signed(
        self, issuer: nkeys.KeyPair, subject: str, name: str, claims: dict[str, Any], seconds: float = 0.0
    ) -> str:
        body = {
            "jti": os.urandom(16).hex(),
            "iat": int(time.time()),
            "iss": _public(issuer),
            "sub": subject,
            "name": name,
            "nats": claims | {"version": 2},
        }
        if seconds:
            body["exp"] = int(time.time() + seconds)
        signed = f"{_encoded({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_encoded(body)}"
        signature = base64.urlsafe_b64encode(issuer.sign(signed.encode())).rstrip(b"=").decode()
        return f"{signed}.{signature}"


def _pair(prefix: int) -> nkeys.KeyPair:
    return nkeys.from_seed(bytearray(nkeys.encode_seed(os.urandom(32), prefix)))


def _public(pair: nkeys.KeyPair) -> str:
    key: str = pair.public_key.decode()
    return key


def _encoded(part: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()
