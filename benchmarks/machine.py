"""The machine of a benchmark, without which its numbers cannot be compared."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def machine(*packages: str) -> str:
    """One line: processor, cores that may be used, how busy it was, Python and these packages."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor()
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    load = os.getloadavg()[0]
    return f"{processor}, {os.cpu_count()} cores (load {load:.1f}), Python {platform.python_version()}, {versions}"
