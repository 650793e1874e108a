"""The chart rendered by Helm itself, and what is in it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "kvscope"
RELEASE, NAMESPACE = "rel", "models"
CREDENTIALS = {"secret": "team-a", "key": "user.creds"}
SETUP = {"credentials": {"secret": "team-a-setup", "key": "setup.creds"}}
URLS = ["tls://nats-0.example:4222", "tls://nats-1.example:4222"]
MONITORING = {name: {"enabled": True} for name in ("podMonitor", "serviceMonitor", "prometheusRule", "dashboards")}
OWN_NATS = {"bus": {"enabled": True, "certManager": {"enabled": True}}, "nats": {"enabled": True}}
MATRIX: dict[str, dict[str, Any]] = {
    "as it is": {},
    "sidecar": {"agent": {"kind": "Sidecar", "sidecar": {"metrics": ["http://127.0.0.1:8000/metrics"]}}},
    "sidecar, an existing NATS": {
        "agent": {"kind": "Sidecar"},
        "bus": {"enabled": True, "urls": URLS, "credentials": CREDENTIALS, "setup": SETUP},
        "monitoring": MONITORING,
    },
    "a node each, an existing NATS": {
        "bus": {
            "enabled": True,
            "tenant": "team-a",
            "urls": URLS,
            "credentials": CREDENTIALS,
            "tls": {"secret": "authority", "ca": "ca.crt"},
            "setup": SETUP,
        },
        "hub": {"enabled": True, "replicas": 1, "credentials": {"secret": "team-a-hub", "key": "hub.creds"}},
        "agent": {"config": "keep_days = 3", "tables": "[thresholds]\nleak.finished-held.grace_s = 60"},
    },
    "shared, NATS of its own": {"agent": {"kind": "StatefulSet", "replicas": 4}, **OWN_NATS},
    "shared by client certificate": {
        "agent": {"kind": "StatefulSet"},
        "bus": {
            "enabled": True,
            "urls": URLS,
            "tls": {"secret": "client", "cert": "tls.crt", "key": "tls.key"},
            "setup": {"tls": {"secret": "setup", "cert": "tls.crt", "key": "tls.key"}},
        },
    },
    "one agent without NATS": {"agent": {"kind": "StatefulSet", "replicas": 1}},
    "engines of other namespaces": {
        "agent": {"namespaces": ["team-a", "team-b"], "selector": "llm-d.ai/inferenceServing=true", "port": 8200},
        "networkPolicy": {"enabled": True},
    },
    "everything": {
        "image": {"repository": "registry.example/kvscope", "tag": "1.2.3", "pullSecrets": ["registry"]},
        "agent": {
            "kind": "StatefulSet",
            "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "data": {"size": "5Gi", "storageClass": "fast"},
            "podAnnotations": {"team": "a"},
        },
        **OWN_NATS,
        "publicUrl": "https://ops.example/kvscope",
        "hub": {"enabled": True, "nodeSelector": {"pool": "cpu"}, "config": 'alert = ["https://example.org/hook"]'},
        "monitoring": MONITORING,
        "networkPolicy": {
            "enabled": True,
            "scrapeFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "extraEgress": [{"ports": [{"port": 9093, "protocol": "TCP"}]}],
        },
    },
}


def helm() -> Any:
    """Helm's own library; the test is skipped where it is not."""
    return pytest.importorskip("helm_python", reason="Helm is not here: pip install -c constraints.txt helm-python-sdk")


def rendered(values: dict[str, Any], chart: Path = CHART) -> list[dict[str, Any]]:
    """What Helm would apply."""
    manifests = _manifests(json.dumps(values), chart)
    return [one for text in manifests for one in yaml.load_all(text, yaml.CSafeLoader) if one]


@functools.cache
def _manifests(values: str, chart: Path) -> list[str]:
    """A chart is loaded for each rendering, because that leaves out a dependency for good."""
    with helm().Chart.load(chart) as loaded:
        files: dict[str, str] = loaded.render(json.loads(values), name=RELEASE, namespace=NAMESPACE)
    return [text for path, text in files.items() if path.endswith(".yaml")]


def of_kind(resources: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [each for each in resources if each["kind"] in kinds]


def ours(resources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those of the dependency."""
    return [each for each in resources if each["metadata"].get("labels", {}).get("app.kubernetes.io/name") != "nats"]
