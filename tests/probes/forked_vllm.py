"""Processes that are forked from one that has imported vLLM (tests.probes.forking_vllm)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psutil

from kvscope.lab.vllm_python import PYTHON, ROOT, environment


class ForkedVllm:
    """A process that has imported vLLM; `start` forks one. environment: of all of them."""

    def __init__(self, **more: str) -> None:
        self._process = subprocess.Popen(
            [PYTHON, "-m", "tests.probes.forking_vllm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env=environment(**more),
        )

    def start(self, module: str, *arguments: str, log: Path, **more: str) -> psutil.Process:
        """Start `PYTHON -m MODULE ARGUMENT…`, which appends what it prints to the log."""
        order = {"module": module, "arguments": arguments, "log": str(log), "environment": more}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(order)}\n")
        return psutil.Process(int(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process that forks; those that it started are ended by who asked for them."""
        self._process.kill()
        self._process.communicate()
