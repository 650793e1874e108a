"""The service's threads share few arenas, and Arrow allocates there too: what is set holds until a process ends."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("real_parts")

ARENAS = """
import ctypes, threading
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
print(open("{path}").read().count("<heap nr="))
"""
TRIM = """
import ctypes
from pathlib import Path
from kvscope.monitor.service.allocators import trim_heaps, use_few_allocators

use_few_allocators()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
resident_pages = lambda: int(Path("/proc/self/statm").read_text().split()[1])
allocated = [libc.malloc(100_000) for _ in range(1000)]
for address in allocated:
    ctypes.memset(address, 1, 100_000)
for number, address in enumerate(allocated, 1):
    if number % 10:
        libc.free(address)
before = resident_pages()
trim_heaps()
print(before - resident_pages())
"""
COMMAND = """
import sys
from kvscope.monitor.terminal.cli import main

assert main([{command!r}, "--host", "0.0.0.0"]) == 2, "it lacks a token"
import numpy
import pyarrow as pa
import pyarrow.parquet

rows = numpy.arange(100_000)
table = pa.table({{"rows": rows}}).take(pa.array(rows[::-1]))
pyarrow.parquet.write_table(table, {path!r}, compression="zstd")
others = [getattr(pa, f"{{name}}_memory_pool")() for name in pa.supported_memory_backends() if name != "system"]
print(pa.system_memory_pool().max_memory() > 0, [pool.max_memory() for pool in others])
"""


def output_of(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
@pytest.mark.parametrize("is_called", [True, False])
def test_threads_share_few_arenas(is_called: bool, tmp_path: Path) -> None:
    call = "use_few_allocators()" if is_called else ""
    arenas = int(output_of(ARENAS.format(call=call, path=f"{tmp_path}/arenas.xml")))
    assert (arenas <= 2) == is_called  # otherwise: what the call is for


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_what_is_free_within_the_heaps_is_returned() -> None:
    """900 of 1,000 blocks are freed, and the last of them stays: the heap cannot shrink at its end."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    assert int(output_of(TRIM)) * page_bytes > 60_000_000


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "hub"])
def test_arrow_allocates_nowhere_else(command: str, tmp_path: Path) -> None:
    """What Parquet and the compute functions allocate inside, too: `pyarrow.set_memory_pool` does not reach them."""
    used, others = output_of(COMMAND.format(command=command, path=f"{tmp_path}/rows.parquet")).split(maxsplit=1)
    assert used == "True"
    assert set(others) <= set("[0, ]")
