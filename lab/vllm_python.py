"""The Python that has vLLM, if this machine has one, and a model for it that needs no weights."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from .on_vllm.scheduler_maker import TINY_LLAMA, save_config

ROOT = Path(__file__).parent.parent
PYTHON = os.environ.get("KVSCOPE_TEST_VLLM", "")
UNPACKED = Path(os.environ.get("KVSCOPE_TEST_VLLM_RELEASES", os.devnull))
"""A folder with other releases of vLLM, a folder each: their Python files, ahead of PYTHON's own on its path, are
enough for the bare scheduler. What these need beyond PYTHON's own packages is in the folder `deps`.
"""
RELEASES = ("", *(sorted(path.name for path in UNPACKED.glob("[0-9]*")) if UNPACKED.is_dir() else ()))
"""The one that PYTHON has, and those."""

needs_vllm = pytest.mark.skipif(
    not PYTHON, reason="KVSCOPE_TEST_VLLM does not name a Python that has vLLM (scripts/vllm.sh makes one)"
)
PAIRS = os.environ.get("KVSCOPE_TEST_VLLM_PAIRS", "")
"""A Python that has that vLLM and its KV connectors' packages."""
needs_pairs = pytest.mark.skipif(
    not PAIRS, reason="KVSCOPE_TEST_VLLM_PAIRS does not name a Python that has them (scripts/vllm_pairs.sh makes one)"
)
MODEL: dict[str, Any] = TINY_LLAMA
run_program: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
"""Runs a module in a process of its own. kvscope.lab.mutation runs it in a fork of a process that has imported vLLM."""


def save_model(directory: Path) -> Path:
    return save_config(directory)


def environment(**more: str) -> dict[str, str]:
    ours = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return os.environ | ours | more


def run(module: str, *arguments: str, release: str = "", **more: str) -> str:
    """Run a module of the tests with vLLM's Python, or with another release on its path; what it printed."""
    path = [str(UNPACKED / release), str(UNPACKED / "deps")] if release else []
    done = run_program(
        [PYTHON, "-m", module, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(PYTHONPATH=os.pathsep.join([*path, str(ROOT)]), **more),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def announce(directory: Path) -> Path:
    """What an installation of kvscope would leave for vLLM to find, without installing anything there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return announce_plugins(
        directory, project["name"], project["version"], project["entry-points"]["vllm.general_plugins"]
    )


def announce_plugins(directory: Path, name: str, version: str, plugins: Mapping[str, str]) -> Path:
    """What an installation of these plug-ins (MODULE:FUNCTION by name) would leave: their entry points."""
    info = directory / "found" / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{plugin} = {value}" for plugin, value in plugins.items()]
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines]))
    return info.parent


def free_ports() -> int:
    """The first of two neighbours: the replay socket is where readers look for it, beside the stream.

    vLLM takes a minute to get there, so they are not among those that connections of others are given meanwhile.
    """
    for port in random.sample(range(20_000, 32_000, 2), 100):
        one, other = ("127.0.0.1", port), ("127.0.0.1", port + 1)
        with contextlib.suppress(OSError), socket.create_server(one), socket.create_server(other):
            return port
    raise AssertionError("no two ports are free side by side")
