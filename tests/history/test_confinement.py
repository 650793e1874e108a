"""A confined process cannot write outside its directory by any call, and cannot take more than its bounds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.history.hostile_sql import fingerprint

pytestmark = pytest.mark.usefixtures("real_parts")

ATTEMPTS = """
import os, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from kvscope.monitor.history.sql_process import limit_resources, write_only_beneath

inside, kept = Path(sys.argv[1]), Path(sys.argv[2])
limit_resources(600 << 20, 1 << 20, 60)
if not write_only_beneath(inside):
    raise SystemExit(3)
attempts = {
    "write": lambda: (kept / "file").write_bytes(b"gone"),
    "append": lambda: open(kept / "file", "ab"),
    "truncate on opening": lambda: os.open(kept / "file", os.O_RDWR | os.O_TRUNC),
    "truncate": lambda: os.truncate(kept / "file", 0),
    "new": lambda: (kept / "new").write_bytes(b""),
    "remove": lambda: (kept / "file").unlink(),
    "rename": lambda: (kept / "file").rename(kept / "other"),
    "move away": lambda: (kept / "file").rename(inside / "file"),
    "move in": lambda: (inside / "mine").rename(kept / "file"),
    "link": lambda: (kept / "link").hardlink_to(inside / "mine"),
    "symlink": lambda: (kept / "link").symlink_to("/etc/passwd"),
    "directory": lambda: (kept / "directory").mkdir(),
    "remove directory": lambda: (kept / "empty").rmdir(),
    "fifo": lambda: os.mkfifo(kept / "fifo"),
    "program": lambda: subprocess.run(["/bin/true"]),
    "a thread's": lambda: [*ThreadPoolExecutor(1).map(os.unlink, [kept / "file"])],
    "large file": lambda: (inside / "large").write_bytes(bytes(2 << 20)),
    "memory": lambda: bytearray(1 << 30),
}
(inside / "mine").write_bytes(b"mine")
(inside / "large").write_bytes(bytes(1 << 20))
assert (kept / "file").read_bytes() == b"kept"
for name, attempt in attempts.items():
    try:
        attempt()
    except (OSError, MemoryError):
        continue
    print(name)
"""


def test_a_confined_process_writes_beneath_its_directory_alone(tmp_path: Path) -> None:
    for name in ("inside", "kept", "kept/empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"kept")
    before = fingerprint(tmp_path / "kept")
    command = [sys.executable, "-c", ATTEMPTS, str(tmp_path / "inside"), str(tmp_path / "kept")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip("no Landlock: needs Linux 6.2, with landlock in /sys/kernel/security/lsm")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert fingerprint(tmp_path / "kept") == before
