"""The probe loads in a real vLLM whatever files the working directory has."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kvscope.lab.vllm_python import PYTHON, ROOT, announce, environment, needs_vllm

LOAD = """
from vllm.plugins import load_plugins_by_group
print("loaded", load_plugins_by_group("vllm.general_plugins")["kvscope"].__module__)
"""


@needs_vllm
def test_vllm_loads_the_probe_beside_files_that_have_our_folders_names(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for name in ("monitor", "engine", "kernels", "dashboards"):
        (work / f"{name}.py").write_text("raise RuntimeError('not ours')\n")
    done = subprocess.run(
        [PYTHON, "-c", LOAD],
        cwd=work,
        env=environment(PYTHONPATH=f"{announce(tmp_path)}:{ROOT}"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "loaded kvscope.monitor.probes.vllm.plugin" in done.stdout, done.stdout + done.stderr
