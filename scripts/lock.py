"""Writes monitor.lock and engine.lock: what images and units install, with the hashes of every file of each release.

    python -m scripts.lock

monitor.lock   `pip install --require-hashes -r monitor.lock`: what [monitor,fleet] and the build need
engine.lock    what [engine] needs beyond that, without torch and what torch brings

The versions are those of constraints.txt: change them there, then run this. It asks the package index that pip is set
to, by pip-tools in an environment of its own, and no file names that index. Which build of torch is right depends on
the machine, so that one is installed by its version alone, before engine.lock.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.sbom import CONSTRAINTS, ROOT

PIP_TOOLS: Final = "pip-tools==7.6.2"
MONITOR_LOCK: Final = ROOT / "monitor.lock"
ENGINE_LOCK: Final = ROOT / "engine.lock"
NOT_LOCKED: Final = frozenset({"torch", "triton"})
HEADER: Final = (
    "# Written by `python -m scripts.lock` from pyproject.toml and constraints.txt, for Linux and Python 3.11.\n"
)


def monitor_requirements() -> list[str]:
    """Return what the service and its build ask for."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, extras = read["project"], read["project"]["optional-dependencies"]
    return [
        *read["build-system"]["requires"],
        *project["dependencies"],
        *extras["serve"],
        *extras["history"],
        *extras["fleet"],
    ]


def engine_requirements() -> list[str]:
    """Return what the engine asks for, without torch."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = read["project"]["optional-dependencies"]["engine"]
    return [each for each in asked if canonicalize_name(Requirement(each).name) not in NOT_LOCKED]


def locked(lock: Path) -> dict[str, str]:
    """Return the version of each package in a lock, by its canonical name."""
    lines = (line.split(" \\")[0].strip() for line in lock.read_text(encoding="utf-8").splitlines())
    return {
        canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines) if version
    }


def main() -> int:
    """Write both."""
    with tempfile.TemporaryDirectory(prefix="kvscope-lock-") as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip", PIP_TOOLS], check=True)
        MONITOR_LOCK.write_text(HEADER + _compiled(python, monitor_requirements()), encoding="utf-8")
        ENGINE_LOCK.write_text(
            HEADER + _compiled(python, engine_requirements(), [f"--constraint={MONITOR_LOCK}"]), encoding="utf-8"
        )
    return 0


def _compiled(python: str, requirements: Iterable[str], more: Sequence[str] = ()) -> str:
    flags = ("generate-hashes", "strip-extras", "no-annotate", "no-header", "quiet", "allow-unsafe")
    command = [python, "-m", "piptools", "compile", *(f"--{flag}" for flag in flags), *_NO_INDEX]
    command += [f"--constraint={CONSTRAINTS}", *more, "--output-file=-", "-"]
    environment = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
    done = subprocess.run(command, input="\n".join(requirements), env=environment, stdout=subprocess.PIPE, text=True)
    done.check_returncode()
    return done.stdout


_NO_INDEX: Final = ("--no-emit-index-url", "--no-emit-trusted-host", "--no-emit-find-links", "--no-emit-options")


if __name__ == "__main__":
    sys.exit(main())
