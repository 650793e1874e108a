"""What a hostile page, a proxy or a careless link may do to `monitor serve`, with a token and without."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Iterator
from http.cookies import SimpleCookie
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.web.parts import service

NOWHERE = "ipc:///tmp/kvscope-no-engine-is-here"
TOKEN = "a-token"
OWN_SCRIPT = {"sec-fetch-site": "same-origin"}
PAGE_LOAD = {"accept": "text/html"}


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    with service("--events", NOWHERE, "--token", TOKEN) as url:
        yield url


@pytest.fixture(scope="module")
def unguarded() -> Iterator[str]:
    with service("--events", NOWHERE) as url:
        yield url


@pytest.fixture(params=["with a token", "without one"])
def address(request: pytest.FixtureRequest, guarded: str, unguarded: str) -> str:
    return guarded if request.param == "with a token" else unguarded


@pytest.fixture
def client() -> Iterator[httpx2.Client]:
    with httpx2.Client(trust_env=False, headers={"authorization": f"Bearer {TOKEN}"}) as client:
        yield client


@pytest.fixture
def visitor() -> Iterator[httpx2.Client]:
    with httpx2.Client(trust_env=False, headers=PAGE_LOAD) as client:
        yield client


@pytest.mark.parametrize(
    "hostile",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "null"},
        {"origin": "file://HOST"},
        {"origin": "http://HOST@evil.example"},
        {"origin": "http://HOST/"},
        {"origin": ""},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site"},
        {"origin": "http://HOST", "sec-fetch-site": "same-site"},
    ],
)
def test_only_our_own_page_changes_anything(address: str, client: httpx2.Client, hostile: dict[str, str]) -> None:
    """Also with a token: a browser sends the cookie of one port of a host to all others."""
    host = urlsplit(address).netloc
    sent = {name: value.replace("HOST", host) for name, value in hostile.items()}
    assert client.post(f"{address}/api/alerts/test", headers=sent).status_code == 403


@pytest.mark.parametrize("own", ["nothing", "origin", "script", "both", "typed"])
def test_our_page_and_programs_reach_what_changes_something(address: str, client: httpx2.Client, own: str) -> None:
    headers = {
        "nothing": {},
        "origin": {"origin": address},
        "script": OWN_SCRIPT,
        "both": {"origin": address} | OWN_SCRIPT,
        "typed": {"sec-fetch-site": "none"},
    }[own]
    # This service sends no alerts, so the route itself answers 404.
    assert client.post(f"{address}/api/alerts/test", headers=headers).status_code == 404


LINK = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_link_from_elsewhere_opens_a_page_and_nothing_else_does(
    address: str, client: httpx2.Client, site: str
) -> None:
    """An alert's link in a chat opens a page. Whatever a page of another origin loads itself is refused."""
    from_there = {"sec-fetch-site": site}
    for path in ("/", "/findings?id=x", "/docs/runbooks/leak.finished-held", "/metrics"):
        assert client.get(address + path, headers=from_there | LINK).status_code in (200, 404)
        for part in (
            {"sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
            {"sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
            {"sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},
            {},
        ):
            assert client.get(address + path, headers=from_there | part).status_code == 403
    for path in ("/api", "/api/engines", "/api/sql", "/_dash-layout", "/_dash-component-suites/dash/deps/x.js"):
        for method in ("GET", "HEAD", "POST", "OPTIONS"):
            refused = client.request(method, address + path, headers=from_there | LINK)
            assert refused.status_code == 403
            assert method == "HEAD" or "a page of another origin" in refused.text
    assert client.post(address, headers=from_there | LINK).status_code == 403


def test_programs_that_send_no_such_header_are_answered(address: str, client: httpx2.Client) -> None:
    """Prometheus, curl, the kubelet; and an address that somebody typed."""
    for headers in ({}, {"sec-fetch-site": "none"}, {"sec-fetch-site": "same-origin"}):
        for path in ("/metrics", "/api/engines", "/healthz", "/_dash-layout"):
            assert client.get(address + path, headers=headers).status_code == 200


def test_without_tls_a_page_of_https_is_another(unguarded: str, client: httpx2.Client) -> None:
    origin = {"origin": unguarded.replace("http:", "https:")}
    assert client.get(f"{unguarded}/api/engines", headers=origin).status_code == 403


def test_a_bearer_is_named_as_one_in_any_case(guarded: str, client: httpx2.Client) -> None:
    for scheme, status in (("Bearer ", 200), ("bearer ", 200), ("", 401), ("Basic ", 401)):
        answer = client.get(f"{guarded}/api/engines", headers={"authorization": f"{scheme}{TOKEN}"})
        assert answer.status_code == status


@pytest.mark.parametrize("lines", ["Host: 127.0.0.1/x", "Host: 127.0.0.1\r\nHost: 127.0.0.1", "Host: a@127.0.0.1"])
def test_a_host_is_one_name_and_a_port(unguarded: str, lines: str) -> None:
    with socket.create_connection(("127.0.0.1", urlsplit(unguarded).port or 0)) as plain:
        plain.sendall(f"GET /api/engines HTTP/1.1\r\n{lines}\r\n\r\n".encode())
        assert plain.recv(1000).split()[1] in (b"400", b"403")


@pytest.mark.parametrize("path", ["/", "/healthz", "/api/engines", "/api/none", "/metrics", "/alerts"])
def test_every_answer_confines_what_a_browser_does_with_it(address: str, path: str) -> None:
    headers = httpx2.get(address + path, trust_env=False).headers  # with a token: the refusal
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "unsafe-eval" not in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cross-origin-resource-policy"] == "same-origin"


def test_the_token_in_an_address_becomes_a_session_and_leaves_it(guarded: str, visitor: httpx2.Client) -> None:
    first = visitor.get(guarded, params={"token": TOKEN, "engine": "a b"})
    assert (first.status_code, first.headers["location"]) == (303, "/?engine=a+b")
    (cookie,) = SimpleCookie(first.headers["set-cookie"]).values()
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Strict", "/")
    assert 0 < int(cookie["max-age"]) <= 30 * 86_400
    assert not cookie["secure"]
    assert TOKEN not in cookie.value
    assert len(cookie.value) >= 32
    assert visitor.get(f"{guarded}/api/engines").status_code == 200
    assert httpx2.get(f"{guarded}/api/engines", cookies={cookie.key: TOKEN}, trust_env=False).status_code == 401
    again = httpx2.get(guarded, params={"token": TOKEN}, headers=PAGE_LOAD, trust_env=False)
    (other,) = SimpleCookie(again.headers["set-cookie"]).values()
    assert other.value != cookie.value


def test_behind_tls_the_cookie_is_for_tls_alone(guarded: str, visitor: httpx2.Client) -> None:
    proxied = {"x-forwarded-proto": "https", "host": "kv.example"}
    answer = visitor.get(guarded, params={"token": TOKEN}, headers=proxied)
    (cookie,) = SimpleCookie(answer.headers["set-cookie"]).values()
    assert cookie["secure"]
    assert answer.headers["location"] == "/"


@pytest.mark.parametrize("path", ["//evil.example", "/\\evil.example", "/%5cevil.example", "/%0d%0aSet-Cookie:x=y"])
def test_the_way_on_stays_here(guarded: str, path: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(guarded).netloc, timeout=30)
    connection.putrequest("GET", f"{path}?token={TOKEN}")
    connection.putheader("Accept", "text/html")
    connection.endheaders()
    answer = connection.getresponse()
    connection.close()
    assert answer.status == 303
    assert re.match(r"/[^/\\]", answer.headers["location"])
    assert len(answer.headers.get_all("set-cookie") or ()) == 1


def test_a_component_that_is_not_there_is_not_found(unguarded: str, client: httpx2.Client) -> None:
    for path in ("dash/none.js", "none/x.js", "dash/..%2f..%2fetc/passwd"):
        answer = client.get(f"{unguarded}/_dash-component-suites/{path}")
        assert answer.status_code == 404
        assert "registered" not in answer.text


def test_a_body_is_not_read_before_the_token(guarded: str) -> None:
    with socket.create_connection(("127.0.0.1", urlsplit(guarded).port or 0), timeout=20) as plain:
        head = "POST /_dash-update-component HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        plain.sendall(f"{head}Content-Length: 500000\r\n\r\n".encode())
        assert plain.recv(1000).split()[1] == b"401"
