"""What finders make of files, and of answers of real servers: HTTP, DNS, and a stand-in for the Kubernetes API."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import dns.message
import dns.name
import dns.rcode
import dns.rrset
import kubernetes_validate
import pytest
import yaml

from kvscope.monitor.base import limits
from kvscope.monitor.sources.discovery_config import (
    DiscoveryConfig,
    DiscoveryFailed,
    FoundTarget,
    discovery_of,
    found_targets,
)
from tests.dashboards.programs import free_port

Answer = Callable[[str, dict[str, str]], tuple[int, bytes]]


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """A server that answers GET of a path and its headers with a status and a body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def found(config: DiscoveryConfig) -> list[str]:
    with closing(config.finder()) as finder:
        return [each.target for each in finder.find().targets]


# -------------------------------------------------------------------- target groups


def test_labels_name_what_to_read() -> None:
    groups = [
        {"targets": ["a:8000", "[::1]:8000"]},
        {"targets": ["b"], "labels": {"kvscope_events": "5757"}},
        {"targets": ["c:1"], "labels": {"__meta_kvscope_events": "tcp://d:2", "__scheme__": "https"}},
        {"targets": ["e:3"], "labels": {"__scheme__": "https", "__metrics_path__": "/m?x=1"}},
        {"targets": ["e:3", "a:8000"], "labels": {"__scheme__": "https", "__metrics_path__": "/m?x=1"}},
    ]
    assert found_targets(groups, {}, "here").targets == (
        FoundTarget("http://a:8000/metrics", False),
        FoundTarget("http://[::1]:8000/metrics", False),
        FoundTarget("tcp://b:5757", True),
        FoundTarget("tcp://d:2", True),
        FoundTarget("https://e:3/m?x=1", False),
        FoundTarget("https://a:8000/m?x=1", False),
    )
    by_default = found_targets([{"targets": ["a:8000"]}], {"kvscope_events": "5757"}, "here")
    assert by_default.targets == (FoundTarget("tcp://a:5757", True),)


@pytest.mark.parametrize(
    ("address", "labels"),
    [
        ("a", {}),
        ("a:port", {}),
        ("user@a:1", {}),
        ("a:1/path", {}),
        ("a:1", {"kvscope_events": "/etc/passwd"}),
        ("a:1", {"kvscope_events": "99999"}),
        ("a:1", {"__scheme__": "file"}),
        ("a:1", {"__metrics_path__": "metrics"}),
        ("", {}),
    ],
)
def test_a_target_that_names_nothing_is_left_out_and_the_others_are_read(address: str, labels: dict[str, str]) -> None:
    targets, left_out = found_targets([{"targets": [address], "labels": labels}, {"targets": ["b:1"]}], {}, "the list")
    assert targets == (FoundTarget("http://b:1/metrics", False),)
    assert len(left_out) == 1
    assert "the list: " in left_out[0]


@pytest.mark.parametrize("document", [{}, ["a:1"], [{"targets": "a:1"}], [{"labels": {}}], [{"targets": [1]}], None])
def test_what_is_no_list_of_groups_is_refused(document: object) -> None:
    with pytest.raises(DiscoveryFailed, match="is not a list of target groups"):
        found_targets(document, {}, "here")


def test_a_list_has_a_bound() -> None:
    groups = [{"targets": [f"a:{port}" for port in range(1, limits.SOURCES + 2)]}]
    with pytest.raises(DiscoveryFailed, match="more than 512 targets"):
        found_targets(groups, {}, "here")


# -------------------------------------------------------------------- file_sd


def test_files_are_read_as_they_change(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('[{"targets": ["a:1"]}]')
    (tmp_path / "two.yml").write_text("- targets: [b:2]\n  labels: {kvscope_events: '5757'}\n")
    config = discovery_of("file_sd", {"files": [f"{tmp_path}/*.json", f"{tmp_path}/two.yml"]})
    finder = config.finder()
    assert [each.target for each in finder.find().targets] == ["http://a:1/metrics", "tcp://b:5757"]
    new = tmp_path / ".one.json.new"
    new.write_text('[{"targets": ["c:3"]}]')
    new.rename(tmp_path / "one.json")
    assert [each.target for each in finder.find().targets] == ["http://c:3/metrics", "tcp://b:5757"]
    (tmp_path / "one.json").unlink()
    assert [each.target for each in finder.find().targets] == ["tcp://b:5757"]
    (tmp_path / "two.yml").unlink()
    with pytest.raises(DiscoveryFailed, match=r"two\.yml cannot be read: No such file"):
        finder.find()


BOMB = "a: &a [x, x, x]\nb: &b [*a, *a, *a]\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.json", b"[", "is no JSON"),
        ("t.json", b"\xff", "is no JSON"),
        ("t.json", b"[" * 100_000, "is no JSON"),
        ("t.yaml", b"- targets: [", "is no YAML"),
        ("t.yaml", BOMB.encode(), "aliases"),
        ("t.yaml", b"!!python/object/apply:os.system [true]", "is no YAML"),
        ("t.json", b" " * (limits.TARGET_LIST_BYTES + 1), "has more than 4 MiB"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DiscoveryFailed, match=message) as error:
        found(discovery_of("file_sd", {"files": [str(tmp_path / name)]}))
    assert str(tmp_path / name) in str(error.value)


# -------------------------------------------------------------------- http_sd


@pytest.mark.usefixtures("real_parts")
def test_a_server_lists_targets(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token\n")
    asked: list[dict[str, str]] = []

    def answer(_path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        asked.append(headers)
        return 200, b'[{"targets": ["a:1"]}]'

    with answering(answer) as url:
        config = discovery_of(
            "http_sd", {"url": f"{url}/targets?secret=x", "refresh": "5m", "bearer_file": str(tmp_path / "token")}
        )
        assert found(config) == ["http://a:1/metrics"]
    assert asked[0]["authorization"] == "Bearer a-token"
    assert asked[0]["x-prometheus-refresh-interval-seconds"] == "300"
    assert "secret" not in config.name


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (500, b"[]", "answers 500 Internal Server Error"),
        (302, b"[]", "answers 302 Found"),
        (200, b"<html>", "no JSON"),
        (200, b" " * (limits.TARGET_LIST_BYTES + 1), "more than 4,194,304 bytes"),
    ],
)
@pytest.mark.usefixtures("real_parts")
def test_a_server_that_gives_no_list_is_named(status: int, body: bytes, message: str) -> None:
    with answering(lambda _path, _headers: (status, body)) as url, pytest.raises(DiscoveryFailed, match=message):
        found(discovery_of("http_sd", {"url": url}))


@pytest.mark.usefixtures("real_parts")
def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(DiscoveryFailed, match="does not answer"):
        found(discovery_of("http_sd", {"url": f"http://127.0.0.1:{free_port()}/"}))


# -------------------------------------------------------------------- DNS


@contextmanager
def nameserver(records: dict[tuple[str, str], list[str]]) -> Iterator[str]:
    """A DNS server on UDP: what it has no records of at all does not exist, and it cannot answer for broken.test."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        over = threading.Event()
        server.settimeout(0.05)

        def answer() -> None:
            while not over.is_set():
                try:
                    packet, sender = server.recvfrom(4096)
                except TimeoutError:
                    continue
                query = dns.message.from_wire(packet)
                (question,) = query.question
                name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
                response = dns.message.make_response(query)
                if name == "broken.test":
                    response.set_rcode(dns.rcode.SERVFAIL)
                elif name not in {known for known, _ in records}:
                    response.set_rcode(dns.rcode.NXDOMAIN)
                elif (name, kind) in records:
                    response.answer.append(dns.rrset.from_text_list(question.name, 60, "IN", kind, records[name, kind]))
                server.sendto(response.to_wire(), sender)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            over.set()
            thread.join()


@pytest.mark.usefixtures("real_parts")
def test_names_stand_for_addresses_or_hosts_and_ports() -> None:
    records = {
        ("engines.test", "A"): ["10.0.0.1", "10.0.0.2"],
        ("engines.test", "AAAA"): ["fd00::1"],
        ("_metrics._tcp.engines.test", "SRV"): ["0 0 8000 pod-0.engines.test.", "0 0 8001 pod-1.engines.test."],
    }
    with nameserver(records) as server:
        addresses = discovery_of(
            "dns", {"names": ["engines.test", "gone.test"], "type": "A", "port": 8000, "nameserver": server}
        )
        assert sorted(found(addresses)) == [
            "http://10.0.0.1:8000/metrics",
            "http://10.0.0.2:8000/metrics",
            "http://[fd00::1]:8000/metrics",
        ]
        services = discovery_of(
            "dns",
            {"names": ["_metrics._tcp.engines.test"], "nameserver": server, "labels": {"kvscope_events": "5757"}},
        )
        assert sorted(found(services)) == ["tcp://pod-0.engines.test:5757", "tcp://pod-1.engines.test:5757"]
        with pytest.raises(DiscoveryFailed, match=r"the DNS gave no SRV records of broken\.test"):
            found(discovery_of("dns", {"names": ["broken.test"], "nameserver": server}))


def test_a_system_without_a_dns_server_is_reported_when_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(_resolver: dns.resolver.Resolver) -> None:
        raise dns.resolver.NoResolverConfiguration

    monkeypatch.setattr(dns.resolver.Resolver, "read_resolv_conf", lambda self, _file: none(self))
    with pytest.raises(DiscoveryFailed, match="names no DNS server"):
        found(discovery_of("dns", {"names": ["engines.test"]}))


# -------------------------------------------------------------------- Kubernetes


def pod(name: str, ip: str = "", phase: str = "Running", **annotations: str) -> dict[str, Any]:
    kept = {f"kvscope.io/{key}": value for key, value in annotations.items()}
    return {"metadata": {"name": name, "annotations": kept}, "status": {"phase": phase, "podIP": ip}, "spec": {}}


@pytest.mark.usefixtures("real_parts")
def test_pods_are_listed_by_selector_with_the_service_account(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of-the-account")
    (tmp_path / "namespace").write_text("models")
    pages = {
        "": [pod("a", "10.0.0.1"), pod("b", "10.0.0.2", events="5757"), pod("c", "10.0.0.3", port="9000")],
        "more": [
            pod("d", phase="Pending"),
            pod("e", "10.0.0.5", phase="Succeeded"),
            pod("f", "10.0.0.6", events="tcp://10.9.9.9:1"),
            pod("g", "fd00::7"),
        ],
    }
    asked: list[tuple[str, dict[str, list[str]]]] = []

    def answer(path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        if headers.get("authorization") != "Bearer of-the-account":
            return 401, b"{}"
        parts = urlsplit(path)
        query = parse_qs(parts.query)
        asked.append((parts.path, query))
        items = pages[query.get("continue", [""])[0]]
        following = "" if "continue" in query else "more"
        return 200, json.dumps({"kind": "PodList", "metadata": {"continue": following}, "items": items}).encode()

    with answering(answer) as url:
        block = {"selector": "app=vllm,tier!=test", "api": url, "token_file": str(tmp_path / "token")}
        with closing(discovery_of("kubernetes", block).finder()) as finder:
            targets, left_out = finder.find()
        assert [each.target for each in targets] == [
            "http://10.0.0.1:8000/metrics",
            "tcp://10.0.0.2:5757",
            "http://10.0.0.3:9000/metrics",
            "http://[fd00::7]:8000/metrics",
        ]
        # The owner of a pod does not choose which other address is read.
        assert len(left_out) == 1
        assert "pod f" in left_out[0]
        assert {path for path, _ in asked} == {"/api/v1/namespaces/models/pods"}
        assert asked[0][1]["labelSelector"] == ["app=vllm,tier!=test"]
        (tmp_path / "token").write_text("expired")
        with pytest.raises(DiscoveryFailed, match="answers 401 Unauthorized"):
            found(discovery_of("kubernetes", block))


@pytest.mark.usefixtures("real_parts")
def test_an_agent_of_a_node_asks_for_that_nodes_pods_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, list[str]]] = []

    def answer(path: str, _headers: dict[str, str]) -> tuple[int, bytes]:
        asked.append(parse_qs(urlsplit(path).query))
        return 200, json.dumps({"items": [pod("a", "10.0.0.1")]}).encode()

    with answering(answer) as url:
        block = {"selector": "a=b", "namespace": "models", "api": url, "token_file": str(tmp_path / "none")}
        found(discovery_of("kubernetes", block))
        monkeypatch.setenv("KVSCOPE_NODE", "gpu-7")
        found(discovery_of("kubernetes", block | {"own_node": True}))
        monkeypatch.delenv("KVSCOPE_NODE")
        with pytest.raises(DiscoveryFailed, match="own_node needs KVSCOPE_NODE"):
            found(discovery_of("kubernetes", block | {"own_node": True}))
    assert [query.get("fieldSelector") for query in asked] == [None, ["spec.nodeName=gpu-7"]]


def test_the_permissions_in_the_docs_are_valid_and_enough() -> None:
    text = (Path(__file__).parents[2] / "docs" / "scale-out.md").read_text()
    (block,) = re.findall(r"```yaml\n(apiVersion: rbac.*?)```", text, re.DOTALL)
    role, binding = yaml.safe_load_all(block)
    for resource in (role, binding):
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


def test_outside_of_a_cluster_the_api_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(DiscoveryFailed, match="KUBERNETES_SERVICE_HOST is not set"):
        found(discovery_of("kubernetes", {"selector": "a=b", "namespace": "x"}))
