"""The systemd units: systemd accepts them, and their command starts, reports that it is ready, and reloads."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvscope.monitor.base import limits
from kvscope.monitor.base.process_limits import files_of_full_service, threads_of_full_service
from tests.dashboards.programs import free_port, program, running
from tests.deploy.charts import ROOT

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
MONITOR = Path(sys.executable).parent / "monitor"


def of_this_machine(unit: Path, folder: Path) -> Path:
    """The unit with the programs of this machine."""
    path = folder / unit.name
    path.write_text(unit.read_text().replace("/opt/kvscope/bin/monitor", str(MONITOR)))
    return path


@pytest.mark.usefixtures("real_parts")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_it_and_finds_it_confined(unit: Path, tmp_path: Path) -> None:
    analyze = program("systemd-analyze", "systemd")
    path = of_this_machine(unit, tmp_path)
    reported = subprocess.run([analyze, "verify", path], capture_output=True, text=True, check=False)
    assert (reported.returncode, reported.stderr) == (0, ""), reported.stderr
    exposure = [analyze, "security", "--offline=true", "--threshold=20", path]
    reported = subprocess.run(exposure, capture_output=True, text=True, check=False)
    assert reported.returncode == 0, reported.stdout[-500:]


def test_the_units_allow_the_files_and_threads_of_a_full_service() -> None:
    stated = {unit.stem: set(unit.read_text().splitlines()) for unit in UNITS}
    assert {
        f"LimitNOFILE={files_of_full_service()}",
        f"TasksMax={threads_of_full_service()}",
    } <= stated["kvscope-agent"]
    assert {
        f"LimitNOFILE={limits.SERVICE_FILES + limits.SERVICE_CONNECTIONS}",
        f"TasksMax={limits.SERVICE_THREADS}",
    } <= stated["kvscope-hub"]


@pytest.mark.slow
def test_the_agent_of_the_unit_is_ready_and_reloads(tmp_path: Path) -> None:
    unit = (ROOT / "deploy" / "systemd" / "kvscope-agent.service").read_text()
    settings = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    assert settings["Type"] == "notify"
    assert settings["ExecReload"] == "/bin/kill -HUP $MAINPID"
    config = tmp_path / "agent.toml"
    config.write_text(f'events = []\nport = {free_port()}\n[[file_sd]]\nfiles = ["{tmp_path}/*.json"]\n')
    (tmp_path / "engines.json").write_text("[]")
    command = settings["ExecStart"].replace("/opt/kvscope/bin/monitor", str(MONITOR))
    command = command.replace("/etc/kvscope/agent.toml", str(config))
    name, _, data = settings["Environment"].split()[0].partition("=")
    variables = {name: data.replace("%S", str(tmp_path)), "NOTIFY_SOCKET": str(tmp_path / "notify")}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        log = tmp_path / "log"
        with running(command.split(), log, variables) as agent:
            assert systemd.recv(100) == b"READY=1"
            assert systemd.recv(100) == b"WATCHDOG=1"
            os.kill(agent.pid, signal.SIGHUP)
            assert systemd.recv(100) == b"WATCHDOG=1"
            assert agent.poll() is None
            assert (tmp_path / "kvscope" / "history").is_dir()
    assert "Traceback" not in log.read_text()
