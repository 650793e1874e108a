"""Installs the distributions of tests/ that bring plug-ins, as pip does, into a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent


def install(distribution: str, target: Path) -> Path:
    """Build and install tests/DISTRIBUTION into `target`, without the network. Returns `target`."""
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(TESTS / distribution)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


def on_path(target: Path) -> str:
    """Return a PYTHONPATH that has the folder in front."""
    return os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH", ""), str(TESTS.parent)]))
