"""The process of vLLM's Python, as this process drives it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from .fork_server import EpisodeAnswer, EpisodeOrder

VLLM_PYTHON: Final = "KVSCOPE_LAB_VLLM"
"""The Python that has vLLM."""
VLLM_RELEASE: Final = "KVSCOPE_LAB_VLLM_RELEASE"
"""A folder with another release's Python files, put ahead of that Python's own. `deps` beside it has what they need."""
MAX_ERROR_BYTES: Final = 4096
ROOT: Final = Path(__file__).resolve().parents[2]


class VllmWorker:
    """Starts the process. `release` is vLLM's. Raises ValueError if it does not start."""

    def __init__(self, python: str, release_directory: str = "") -> None:
        folder = Path(release_directory).resolve() if release_directory else None
        path = [str(folder), str(folder.parent / "deps")] if folder is not None else []
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*path, str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._process = subprocess.Popen(
            [python, "-m", "kvscope.lab.on_vllm.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )
        self.release = self._line().decode().strip()
        if not self.release:
            raise ValueError(f"--vllm-python {python}: it cannot import vLLM and kvscope{self._last_error()}")

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _last_error(self) -> str:
        """Return the last line that the process wrote to its standard error, after a colon."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - MAX_ERROR_BYTES))
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")

    def run(self, order: EpisodeOrder) -> EpisodeAnswer:
        """Run one episode and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        answered = self._line()
        return (
            msgspec.json.decode(answered, type=EpisodeAnswer)
            if answered
            else EpisodeAnswer(error=f"vLLM's process died{self._last_error()}")
        )

    def kill(self) -> None:
        """End the process and the episode that it runs."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()


@cache
def shared_worker() -> VllmWorker:
    """Return this process's worker, started on first use, by the environment."""
    python = os.environ.get(VLLM_PYTHON, "")
    if not python:
        raise ValueError(f"--engine vllm needs a Python that has vLLM: --vllm-python, or {VLLM_PYTHON}")
    return VllmWorker(python, os.environ.get(VLLM_RELEASE, ""))
