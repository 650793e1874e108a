"""The examples for Kubernetes: their parts find each other, their commands are commands, their rules are the rules."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import kvscope.engine.command_line
from kvscope.dashboards.prometheus.rules import GENERATED_RULES, KUBERNETES, as_kubernetes
from kvscope.monitor.terminal import cli
from tests.dashboards.programs import ROOT, program

FOLDER = ROOT / "dashboards" / "kubernetes"


@cache
def resources() -> dict[str, Any]:
    """The resources in the folder, by kind."""
    return {one["kind"]: one for path in FOLDER.iterdir() for one in yaml.safe_load_all(path.read_text())}


def pod() -> dict[str, Any]:
    found: dict[str, Any] = resources()["Deployment"]["spec"]["template"]
    return found


def containers() -> dict[str, Any]:
    return {container["name"]: container for container in pod()["spec"]["containers"]}


def test_the_checked_in_rules_are_the_generated_ones_and_prometheus_own() -> None:
    assert KUBERNETES.read_text() == as_kubernetes(), "run `python -m kvscope.dashboards.prometheus`"
    assert resources()["PrometheusRule"]["spec"] == yaml.safe_load(GENERATED_RULES.read_text())


@pytest.mark.usefixtures("real_parts")
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    promtool = program("promtool", "prometheus")
    rules = tmp_path / "rules.yml"
    rules.write_text(yaml.safe_dump(resources()["PrometheusRule"]["spec"]))
    reported = subprocess.run([promtool, "check", "rules", str(rules)], capture_output=True, text=True, check=False)
    assert reported.returncode == 0, reported.stdout + reported.stderr


def test_the_commands_are_commands() -> None:
    known = {
        ("python", "-m", "kvscope.engine"): kvscope.engine.command_line.engine_parser(),
        ("monitor",): cli.parser(),
    }
    for container in containers().values():
        words = [*container["command"], *container["args"]]
        (program_, parser) = next((name, of) for name, of in known.items() if tuple(words[: len(name)]) == name)
        parser.parse_args(words[len(program_) :])


def test_the_pod_finds_its_volumes_and_the_service_its_pod() -> None:
    volumes = {volume["name"] for volume in pod()["spec"]["volumes"]}
    for container in containers().values():
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= volumes
        assert "stream" in mounted
    claims = {v["persistentVolumeClaim"]["claimName"] for v in pod()["spec"]["volumes"] if "persistentVolumeClaim" in v}
    assert claims == {resources()["PersistentVolumeClaim"]["metadata"]["name"]}
    assert resources()["Service"]["spec"]["selector"].items() <= pod()["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for container in containers().values() for port in container["ports"]}
    assert {port["targetPort"]: port["port"] for port in resources()["Service"]["spec"]["ports"]} == ports


def test_prometheus_finds_the_service_and_has_its_token_and_the_rules_know_its_job() -> None:
    monitor = resources()["ServiceMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= resources()["Service"]["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in resources()["Service"]["spec"]["ports"]}
    (token,) = containers()["monitor"]["env"]
    assert endpoint["authorization"]["credentials"] == token["valueFrom"]["secretKeyRef"]
    assert f'job="{resources()["Service"]["metadata"]["name"]}"' in KUBERNETES.read_text()


@pytest.mark.parametrize("name", ["engine", "monitor"])
def test_a_container_may_do_as_little_as_it_can(name: str) -> None:
    assert containers().keys() == {"engine", "monitor"}
    container = containers()[name]
    confined = container["securityContext"]
    assert pod()["spec"]["securityContext"]["runAsNonRoot"]
    assert confined["readOnlyRootFilesystem"]
    assert not confined["allowPrivilegeEscalation"]
    assert confined["capabilities"] == {"drop": ["ALL"]}
    assert container["livenessProbe"]
    assert container["resources"]["limits"]["memory"]
    assert container["image"] == f"kvscope:{version('kvscope')}"


@pytest.mark.parametrize("kind", ["Deployment", "Service", "PersistentVolumeClaim"])
def test_a_resource_is_as_kubernetes_own_schema_says(kind: str) -> None:
    kubernetes_validate.validate(resources()[kind], kubernetes_validate.latest_version(), strict=True)
