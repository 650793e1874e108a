"""TLS and .creds over a real nats-server: what is not valid is refused with its reason, what is renewed works again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvscope.monitor.base.errors import CannotTell
from kvscope.monitor.fleet.bus_config import BusConfig
from kvscope.monitor.fleet.bus_link import BusLink
from kvscope.monitor.fleet.bus_subjects import BusRole, permissions_of
from kvscope.monitor.fleet.fleet_reader import read_fleet
from kvscope.monitor.questions.pipeline import Pipeline
from tests.finding_transitions import AlertMessages
from tests.fleet.identities import Authority, Operator, server_tls
from tests.fleet.nats_servers import NatsServer, one_server, set_up, stored_findings
from tests.waiting import until

# nats-py leaves the writer of a connection that it lost to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)
HOST = "127.0.0.1"


def over_tls(server: NatsServer, authority: Authority, pair: tuple[Path, Path] | None = None) -> BusConfig:
    certificate, key = pair or (None, None)
    url = f"tls://{HOST}:{server.port}"
    return BusConfig((url,), agent="a", tls_ca=authority.path, tls_cert=certificate, tls_key=key)


@contextmanager
def linked(config: BusConfig, path: Path | None = None) -> Iterator[BusLink]:
    link = BusLink(config, Pipeline(), path)
    link.start()
    try:
        yield link
    finally:
        link.stop()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_transitions_travel_over_tls_with_a_client_certificate(tmp_path: Path, authority: Authority) -> None:
    with one_server(tmp_path / "nats", server_tls(authority, "server", HOST)) as server:
        config = over_tls(server, authority, authority.issue("agent"))
        set_up(config)
        with linked(config) as link:
            link.put(AlertMessages().fire(1))
            until(lambda: link.spool.messages == 0, "all is sent")
        assert len(stored_findings(config)) == 1
        stranger = Authority(tmp_path, "stranger")
        for other in (
            over_tls(server, authority),
            over_tls(server, authority, stranger.issue("intruder")),
            over_tls(server, stranger, authority.issue("agent")),
        ):
            with pytest.raises(CannotTell, match="does not take the connection"):
                read_fleet(other)


def test_a_server_of_another_name_is_refused_with_the_reason(tmp_path: Path, authority: Authority) -> None:
    with (
        one_server(tmp_path / "nats", server_tls(authority, "server", "10.0.0.1")) as server,
        pytest.raises(CannotTell, match=r"certificate is not valid for '127\.0\.0\.1'"),
    ):
        read_fleet(over_tls(server, authority, authority.issue("agent")))


@pytest.mark.parametrize("expired", ["agent", "server"])
def test_an_expired_certificate_is_named_and_its_renewal_needs_no_restart(
    tmp_path: Path, authority: Authority, expired: str
) -> None:
    settings = server_tls(authority, "server", HOST, days=-1 if expired == "server" else 90)
    with one_server(tmp_path / "nats", settings) as server:
        pair = authority.issue("agent", days=-1 if expired == "agent" else 90)
        received_alerts = AlertMessages()
        with linked(over_tls(server, authority, pair), tmp_path / "bus.sqlite") as link:
            link.put(received_alerts.fire(1))
            until(lambda: "expired" in link.figures().error, "the reason is shown")
            assert link.spool.messages == 1
            authority.issue("agent")  # to the same files
            authority.issue("server", HOST)
            if expired == "server":
                server.kill()
                server.start()
            set_up(over_tls(server, authority, pair))
            link.put(received_alerts.end(9))
            until(lambda: link.spool.messages == 0 and not link.figures().error, "all is sent")
        stored = stored_findings(over_tls(server, authority, pair))
        assert [each.transition.to for each in stored] == ["firing", "resolved"]


# ---------------------------------------------------------------- .creds


def with_creds(server: NatsServer, path: Path, tenant: str = "team-a", role: BusRole = "agent") -> BusConfig:
    return BusConfig((server.url,), tenant=tenant, agent="a", credentials=path, role=role)


@pytest.mark.slow
def test_credentials_of_an_account_see_that_accounts_tenant_and_nothing_else(tmp_path: Path) -> None:
    operator = Operator(tmp_path, "team-a", "team-b")
    with one_server(tmp_path / "nats", operator.settings()) as server:
        for tenant in ("team-a", "team-b"):
            admin = operator.credentials(tenant, f"admin-{tenant}")
            set_up(with_creds(server, admin, tenant))
            config = with_creds(
                server, operator.credentials(tenant, tenant, permissions_of(tenant, "agent", "a")), tenant
            )
            with linked(config) as link:
                link.put(AlertMessages().fire(1, engine=f"{tenant}-engine"))
                until(lambda link=link: link.spool.messages == 0, "all is sent")  # type: ignore[misc]
            reading = operator.credentials(tenant, f"reader-{tenant}", permissions_of(tenant, "reader"))
            (seen,) = read_fleet(with_creds(server, reading, tenant, "reader")).open_findings()
            assert seen.judgement.engine == f"{tenant}-engine"
        for path, tenant in ((tmp_path / "reader-team-a.creds", "team-b"), (tmp_path / "admin-team-a.creds", "team-b")):
            with pytest.raises(CannotTell):
                read_fleet(with_creds(server, path, tenant, "reader"))
        stranger = Operator(tmp_path, "team-a").credentials("team-a", "stranger")
        with pytest.raises(CannotTell, match="--nats-creds"):
            read_fleet(with_creds(server, stranger))


@pytest.mark.slow
def test_credentials_that_expire_are_read_anew_once_they_are_renewed(tmp_path: Path) -> None:
    operator = Operator(tmp_path, "team-a")
    with one_server(tmp_path / "nats", operator.settings()) as server:
        admin = with_creds(server, operator.credentials("team-a", "admin"))
        set_up(admin)
        allowed = permissions_of("team-a", "agent", "a")
        config = with_creds(server, operator.credentials("team-a", "agent", allowed, seconds=4))
        received_alerts = AlertMessages()
        with linked(config, tmp_path / "bus.sqlite") as link:
            link.put(received_alerts.fire(1))
            until(lambda: link.spool.messages == 0, "all is sent")
            until(lambda: not link.is_connected, "the credentials have expired")
            link.put(received_alerts.end(9))
            until(lambda: "uthori" in link.figures().error or "expired" in link.figures().error, "the reason is shown")
            operator.credentials("team-a", "agent", allowed)  # to the same file
            until(lambda: link.spool.messages == 0 and not link.figures().error, "all is sent")
        assert [each.transition.to for each in stored_findings(admin)] == ["firing", "resolved"]


def test_a_file_that_holds_no_credentials_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "user.creds"
    fields: dict[str, Any] = {"agent": "a", "credentials": path}
    for text in ("", json.dumps({"token": "x"})):
        path.write_text(text)
        with pytest.raises(ValueError, match="neither a NATS user JWT nor the seed"):
            read_fleet(BusConfig((f"nats://{HOST}:4222",), **fields))
