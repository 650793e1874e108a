"""The kustomize component: kubectl adds the sidecar to engines' pods of llm-d and KServe, and to no other pod."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvscope.monitor.terminal import cli
from tests.dashboards.programs import program
from tests.deploy.charts import ROOT

pytestmark = pytest.mark.usefixtures("real_parts")

COMPONENT = ROOT / "deploy" / "kustomize" / "sidecar"
LABEL = {"llm-d.ai/inferenceServing": "true"}
ENGINE = {"name": "vllm", "image": "vllm:1", "env": [{"name": "HF_HOME", "value": "/models"}]}


def deployment(
    name: str, labels: dict[str, str], container: dict[str, Any], kind: str = "Deployment"
) -> dict[str, Any]:
    pod = {
        "metadata": {"labels": {"app": name}},
        "spec": {"containers": [container], "volumes": [{"name": "m", "emptyDir": {}}]},
    }
    spec = {"selector": {"matchLabels": {"app": name}}, "template": pod}
    spec |= {"serviceName": name} if kind == "StatefulSet" else {}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "labels": labels}, "spec": spec}


def other(api: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": kind.lower()}, "spec": spec}


RESOURCES = [
    deployment("decode", LABEL, ENGINE),
    deployment("prefill", LABEL, ENGINE, "StatefulSet"),
    deployment("epp", {"app": "epp"}, {"name": "epp", "image": "epp:1"}),
    other(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        {"leaderWorkerTemplate": {"size": 2, "workerTemplate": {"spec": {"containers": [ENGINE]}}}},
    ),
    other(
        "serving.kserve.io/v1alpha1", "ServingRuntime", {"containers": [{"name": "kserve-container", "image": "v:1"}]}
    ),
    other("serving.kserve.io/v1alpha1", "LLMInferenceService", {"model": {"uri": "hf://a/b"}}),
]
PODS = {
    "decode": ("spec", "template", "spec"),
    "prefill": ("spec", "template", "spec"),
    "leaderworkerset": ("spec", "leaderWorkerTemplate", "workerTemplate", "spec"),
    "servingruntime": ("spec",),
    "llminferenceservice": ("spec", "template"),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What kubectl makes of resources with the component, by name."""
    folder = tmp_path_factory.mktemp("kustomize")
    shutil.copytree(COMPONENT, folder / "kvscope")
    (folder / "engines.yaml").write_text(yaml.safe_dump_all(RESOURCES))
    (folder / "kustomization.yaml").write_text("resources: [engines.yaml]\ncomponents: [kvscope]\n")
    kubectl = program("kubectl", "kubernetes-client")
    reported = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False)
    assert reported.returncode == 0, reported.stderr
    return {each["metadata"]["name"]: each for each in yaml.safe_load_all(reported.stdout)}


def pod_in(resource: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for part in path:
        resource = resource[part]
    return resource


@pytest.mark.parametrize("name", PODS)
def test_an_engines_pod_has_the_sidecar_beside_all_that_it_had(built: dict[str, Any], name: str) -> None:
    pod = pod_in(built[name], PODS[name])
    containers = {each["name"]: each for each in pod["containers"]}
    engine = next(each for each in containers if each != "kvscope")
    assert engine in ("vllm", "kserve-container", "main")
    assert {"name": "KVSCOPE_EVENTS", "value": "tcp://127.0.0.1:5757"} in containers[engine]["env"]
    agent = containers["kvscope"]
    cli.parser().parse_args([*agent["command"], *agent["args"]][1:])
    assert {mount["name"] for mount in agent["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "readinessProbe" not in agent, "an engine serves without its observer"
    if name in ("decode", "prefill"):
        kubernetes_validate.validate(built[name], kubernetes_validate.latest_version(), strict=True)
        assert {"name": "HF_HOME", "value": "/models"} in containers[engine]["env"]
        assert "m" in {volume["name"] for volume in pod["volumes"]}
        assert built[name]["spec"]["template"]["metadata"]["labels"] == {"app": name, "kvscope.io/agent": "sidecar"}


def test_other_pods_are_as_they_were_and_the_pattern_is_not_deployed(built: dict[str, Any]) -> None:
    (epp,) = (each for each in RESOURCES if each["metadata"]["name"] == "epp")
    assert built["epp"] == epp
    assert built.keys() - {each["metadata"]["name"] for each in RESOURCES} == {"kvscope-agent"}
    assert all(isinstance(value, str) for value in labels_in(list(built.values())))


def labels_in(value: Any) -> list[Any]:
    """Every value of every label: one that is no text is refused by Kubernetes."""
    if isinstance(value, dict):
        own = list(value["labels"].values()) if isinstance(value.get("labels"), dict) else []
        return own + [each for part in value.values() for each in labels_in(part)]
    return [each for part in value for each in labels_in(part)] if isinstance(value, list) else []


def test_the_configuration_is_one(tmp_path: Path) -> None:
    assert cli.main(["config", "check", str(COMPONENT / "agent.toml")]) == 0
