"""What is installed: the wheel carries what it should and nothing else; every version is pinned."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from importlib.metadata import distributions, requires
from pathlib import Path

import httpx
import pytest

from tests.dashboards.programs import answers, free_port, running, until
from tests.probes.vllm_python import free_ports

ROOT = Path(__file__).parent.parent
FOLDERS = ("engine", "kernels", "monitor", "dashboards")


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build a wheel or an sdist of `source` in `folder`, with the build backend of this environment."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def test_the_wheel_installs_kvscope_and_nothing_else(wheel: Path) -> None:
    names = names_in(wheel)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvscope"}
    for needed in (
        "kvscope/py.typed",
        "kvscope/engine/command_line.py",
        "kvscope/kernels/paged_decode.py",
        "kvscope/monitor/doctor/report.schema.json",
        "kvscope/monitor/planning/plan.schema.json",
        "kvscope/monitor/runbooks/leak.finished-held.md",
        "kvscope/dashboards/grafana/generated/fleet.json",
        "kvscope/dashboards/web/app.py",
    ):
        assert needed in names
    sources = {f"kvscope/{p.relative_to(ROOT)}" for top in FOLDERS for p in (ROOT / top).rglob("*.py")}
    assert sources <= set(names)
    assert len(names) == len(set(names)), "no file under one name twice"


def test_a_wheel_from_the_sdist_has_the_same_files(wheel: Path, tmp_path: Path) -> None:
    """An archive has no links, so it carries the four folders another way."""
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
        archive.extractall(tmp_path, filter="data")
    again = build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path / "again")
    assert names_in(again) == names_in(wheel)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        differ = [name for name in one.namelist() if one.read(name) != other.read(name)]
    assert [name for name in differ if not name.endswith("/RECORD")] == []


def test_no_hook_runs_at_a_build() -> None:
    """A build takes what is there: nothing is downloaded, and no code of ours runs."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hatch = settings["tool"]["hatch"]
    assert not [part for part in (hatch, hatch["build"], *hatch["build"]["targets"].values()) if "hooks" in part]
    assert settings["build-system"]["requires"] == ["hatchling"]


@pytest.mark.slow
def test_an_installed_wheel_serves_and_watches_an_engine(wheel: Path, tmp_path: Path) -> None:
    """kvscope[engine,monitor] in an environment of its own and outside of any checkout.

    The environment borrows the dependencies that this one has.
    """
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    (packages,) = venv.glob("lib/*/site-packages")
    before = {path.name for path in packages.iterdir()}
    programs = {path.name for path in (venv / "bin").iterdir()}
    pip = [venv / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, "install", "--no-index", "--no-deps", wheel], check=True, env=outside, cwd=tmp_path)
    assert {path.name for path in packages.iterdir()} - before == {
        "kvscope",
        wheel.name.partition("-py3")[0] + ".dist-info",
    }
    assert {path.name for path in (venv / "bin").iterdir()} - programs == {"kvscope", "monitor"}
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))

    kvscope, monitor = venv / "bin" / "kvscope", venv / "bin" / "monitor"
    where = "import kvscope.engine, kvscope.kernels; print(kvscope.engine.__file__, kvscope.kernels.__file__)"
    found = run_in(tmp_path, outside, venv / "bin" / "python", "-c", where)
    assert all(Path(path).is_relative_to(packages) for path in found.stdout.split()), found.stderr
    http, service = free_port(), free_port()
    events = f"tcp://127.0.0.1:{free_ports()}"
    serve = ["engine", "serve", f"--port={http}", f"--events={events}"]
    look = [f"--port={service}", f"--events={events}", f"--data={tmp_path / 'data'}"]
    environment = {name: "" for name in os.environ if name.startswith(("KVSCOPE", "PYTHONPATH"))}
    with (
        running([str(kvscope), *serve], tmp_path / "engine.log", environment) as engine,
        running([str(monitor), "serve", *look], tmp_path / "monitor.log", environment) as observer,
    ):
        until(lambda: answers(f"http://127.0.0.1:{http}/health"), "the engine serves", engine)
        until(lambda: answers(f"http://127.0.0.1:{service}/healthz"), "the monitor serves", observer)
        examined = run_in(tmp_path, outside, monitor, "doctor", events, "--for=2", "--format=json")
        assert examined.returncode == 0, examined.stdout + examined.stderr
        (target,) = json.loads(examined.stdout)["targets"]
        assert target["status"] == "ok"
        page = httpx.get(f"http://127.0.0.1:{service}/docs/runbooks/leak.finished-held.md", trust_env=False)
        assert page.text == (ROOT / "docs" / "runbooks" / "leak.finished-held.md").read_text()
    assert run_in(tmp_path, outside, monitor, "runbook", "leak.finished-held").stdout == page.text
    lab = run_in(tmp_path, outside, monitor, "incidents", "--code=leak.finished-held", "--jobs=1")
    assert lab.returncode == 0, lab.stdout + lab.stderr
    logs = (tmp_path / "engine.log").read_text() + (tmp_path / "monitor.log").read_text()
    assert "Traceback" not in logs


def test_the_lab_names_the_extra_that_it_needs(tmp_path: Path) -> None:
    """An installation without [engine] has no torch."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')\n")
    done = run_in(
        tmp_path,
        {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        sys.executable,
        "-m",
        "kvscope.monitor",
        "incidents",
    )
    assert done.returncode == 2
    assert "needs torch: pip install 'kvscope[engine]'" in done.stderr
    assert "Traceback" not in done.stderr


def run_in(folder: Path, environment: Mapping[str, str], *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_version_is_pinned() -> None:
    """All that `pip install -c constraints.txt -e '.[dev]'` brought is in the file, at that version."""
    installed = {_plain(d.name): d for d in distributions()}
    wanted, seen = {"kvscope"}, set()
    while wanted:
        name = wanted.pop()
        seen.add(name)
        if name in installed:
            needs = requires(name) or []
            wanted |= {_plain(re.split(r"[^A-Za-z0-9._-]", need, maxsplit=1)[0]) for need in needs} - seen
    pins = _pins()
    for name in sorted(seen & set(installed) - {"kvscope", "pip"}):
        assert pins.get(name) == installed[name].version.split("+")[0], name
