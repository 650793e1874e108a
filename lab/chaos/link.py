"""A network namespace for engines and monitor whose link between them can be cut, and a small disk for their data.

Engines publish on the loopback device of the namespace, where the monitor reads them: while that is down, nothing
passes between them. A pair of veth devices leads from the monitor to the receiver and to the run that questions it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

DISK_BYTES: Final = 96 << 20


def run_quietly(*command: str) -> bool:
    """Run a command; whether it succeeded."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


class CutLink:
    """A namespace that is made if that is permitted. `reason`: why there is none."""

    def __init__(self) -> None:
        self.name = f"kvscope-{os.getpid()}"
        self.reason = ""
        subnet = f"10.77.{os.getpid() % 256}"  # two runs at a time do not meet
        self.outside, self.inside = f"{subnet}.1", f"{subnet}.2"
        outside = f"kvx{os.getpid() % 100_000}"
        inside = f"{outside}i"
        steps = (
            ("ip", "netns", "add", self.name),
            ("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", self.name),
            ("ip", "addr", "add", f"{self.outside}/30", "dev", outside),
            ("ip", "link", "set", outside, "up"),
            (*self.prefix, "ip", "addr", "add", f"{self.inside}/30", "dev", inside),
            (*self.prefix, "ip", "link", "set", inside, "up"),
            (*self.prefix, "ip", "link", "set", "lo", "up"),
        )
        for step in steps:
            if not run_quietly(*step):
                self.reason = f"`{' '.join(step[:5])}` is not permitted or not installed"
                self.close()
                return

    @property
    def prefix(self) -> tuple[str, ...]:
        """The start of a command line that runs the rest within the namespace."""
        return ("ip", "netns", "exec", self.name)

    def set_up(self, is_up: bool) -> None:
        """Let packets between engines and monitor pass, or not."""
        if not run_quietly(*self.prefix, "ip", "link", "set", "lo", "up" if is_up else "down"):
            raise RuntimeError("the loopback device of the namespace cannot be changed")

    def close(self) -> None:
        """Remove the namespace, and its devices with it."""
        run_quietly("ip", "netns", "del", self.name)


class SmallDisk:
    """A tmpfs at `directory`, if mounting is permitted. `reason`: why there is none."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        options = f"size={DISK_BYTES},mode=700"
        mounted = run_quietly("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory))
        self.reason = "" if mounted else "mounting a tmpfs is not permitted"

    @property
    def _filler(self) -> Path:
        return self.directory / "filler"

    def fill(self) -> None:
        """Take all space that is left."""
        with self._filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                pass
            try:
                while True:
                    file.write(bytes(512))
            except OSError:
                return

    def free(self) -> None:
        """Give the space back."""
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it."""
        if not self.reason:
            run_quietly("umount", "-l", str(self.directory))
