"""The examples for Kubernetes: their parts find each other, their commands are commands, their rules are the rules."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import kvscope.engine.command_line
from kvscope.dashboards.prometheus.rules import GENERATED_RULES, KUBERNETES, as_kubernetes
from kvscope.monitor import cli
from tests.dashboards.programs import ROOT, program

FOLDER = ROOT / "dashboards" / "kubernetes"
FILES = {path.name: list(yaml.safe_load_all(path.read_text())) for path in sorted(FOLDER.iterdir())}
RESOURCES: dict[str, Any] = {one["kind"]: one for resources in FILES.values() for one in resources}
POD: dict[str, Any] = RESOURCES["Deployment"]["spec"]["template"]
CONTAINERS: dict[str, Any] = {container["name"]: container for container in POD["spec"]["containers"]}
SERVICE: dict[str, Any] = RESOURCES["Service"]


def test_the_checked_in_rules_are_the_generated_ones_and_prometheus_own() -> None:
    assert KUBERNETES.read_text() == as_kubernetes(), "run `python -m kvscope.dashboards.prometheus`"
    assert RESOURCES["PrometheusRule"]["spec"] == yaml.safe_load(GENERATED_RULES.read_text())


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    promtool = program("promtool", "prometheus")
    rules = tmp_path / "rules.yml"
    rules.write_text(yaml.safe_dump(RESOURCES["PrometheusRule"]["spec"]))
    reported = subprocess.run([promtool, "check", "rules", str(rules)], capture_output=True, text=True, check=False)
    assert reported.returncode == 0, reported.stdout + reported.stderr


def test_the_commands_are_commands() -> None:
    known = {
        ("python", "-m", "kvscope.engine"): kvscope.engine.command_line.engine_parser(),
        ("monitor",): cli.parser(),
    }
    for container in CONTAINERS.values():
        words = [*container["command"], *container["args"]]
        (program_, parser) = next((name, of) for name, of in known.items() if tuple(words[: len(name)]) == name)
        parser.parse_args(words[len(program_) :])


def test_the_pod_finds_its_volumes_and_the_service_its_pod() -> None:
    volumes = {volume["name"] for volume in POD["spec"]["volumes"]}
    for container in CONTAINERS.values():
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= volumes
        assert "stream" in mounted
    claims = {v["persistentVolumeClaim"]["claimName"] for v in POD["spec"]["volumes"] if "persistentVolumeClaim" in v}
    assert claims == {RESOURCES["PersistentVolumeClaim"]["metadata"]["name"]}
    assert SERVICE["spec"]["selector"].items() <= POD["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for container in CONTAINERS.values() for port in container["ports"]}
    assert {port["targetPort"]: port["port"] for port in SERVICE["spec"]["ports"]} == ports


def test_prometheus_finds_the_service_and_has_its_token_and_the_rules_know_its_job() -> None:
    monitor = RESOURCES["ServiceMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= SERVICE["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in SERVICE["spec"]["ports"]}
    (token,) = CONTAINERS["monitor"]["env"]
    assert endpoint["authorization"]["credentials"] == token["valueFrom"]["secretKeyRef"]
    assert f'job="{SERVICE["metadata"]["name"]}"' in KUBERNETES.read_text()


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_may_do_as_little_as_it_can(name: str) -> None:
    container = CONTAINERS[name]
    confined = container["securityContext"]
    assert POD["spec"]["securityContext"]["runAsNonRoot"]
    assert confined["readOnlyRootFilesystem"]
    assert not confined["allowPrivilegeEscalation"]
    assert confined["capabilities"] == {"drop": ["ALL"]}
    assert container["livenessProbe"]
    assert container["resources"]["limits"]["memory"]
    assert container["image"] == f"kvscope:{version('kvscope')}"


@pytest.mark.parametrize("kind", ["Deployment", "Service", "PersistentVolumeClaim"])
def test_a_resource_is_as_kubernetes_own_schema_says(kind: str) -> None:
    kubernetes_validate.validate(RESOURCES[kind], kubernetes_validate.latest_version(), strict=True)
