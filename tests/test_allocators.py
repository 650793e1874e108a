"""The service's threads share few arenas, in a process of their own: what is set there holds until its end."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, threading
import pyarrow as pa
from kvscope.monitor.service.allocators import use_few_allocators

{call}
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
together, read = threading.Barrier(16), threading.Barrier(17)

def allocate():
    together.wait()
    libc.malloc(1000)
    read.wait()

for _ in range(16):
    threading.Thread(target=allocate).start()
read.wait()
libc.fopen.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fclose.argtypes = [ctypes.c_void_p]
report = libc.fopen(b"{path}", b"w")
libc.malloc_info(0, report)
libc.fclose(report)
print(open("{path}").read().count("<heap nr="), pa.default_memory_pool().backend_name)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
@pytest.mark.parametrize("is_called", [True, False])
def test_threads_share_few_arenas(is_called: bool, tmp_path: Path) -> None:
    program = PROGRAM.format(call="use_few_allocators()" if is_called else "", path=f"{tmp_path}/arenas.xml")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    arenas, backend = ended.stdout.split()
    if is_called:
        assert (int(arenas) <= 2, backend) == (True, "system")
    else:  # what the call is for
        assert int(arenas) > 2
