"""The process that runs one query: `python -m kvscope.monitor.history.sql_process SCRATCH`.

It is confined before it loads what runs the query: it can write below SCRATCH and nowhere else, whatever DuckDB does,
and its memory, disk and CPU time are bounded. It ends when its standard input does, that is, with who asked. Landlock
is the kernel's own rule (Linux 5.13 and later): neither this process nor its children can get rid of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..base import limits
from ..base.errors import KvscopeError
from .sql_query import REQUEST_FILE, WITHOUT_ANSWER, BadQuery, SqlRequest, cpu_seconds, too_large, too_long

if TYPE_CHECKING:
    from .sql_tables import SqlAnswer


CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System calls of Landlock, with the same numbers on every architecture."""
GET_VERSION: Final = 1
BENEATH: Final = 1
"""The kind of a rule about a directory and all below it."""
NO_NEW_PRIVILEGES: Final = 38
EXECUTE: Final = 1 << 0
WRITES: Final = 1 << 1 | sum(1 << bit for bit in range(4, 13))
"""Open a file for writing, remove files and directories, make files of any kind."""
LATER_WRITES: Final = {2: 1 << 13, 3: 1 << 14}
"""Move to another directory, truncate by path: by the version that knows them."""


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("directory", ctypes.c_int32)]


def limit_resources(address_space: int, file_bytes: int, cpu_s: int) -> None:
    """Bound this process: bytes of address space and of each file that it writes, seconds of CPU time, no core dump."""
    wanted = {
        resource.RLIMIT_AS: address_space,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_CORE: 0,
    }
    for which, value in wanted.items():
        _, hard = resource.getrlimit(which)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (most, most))


def write_only_beneath(directory: Path) -> bool:
    """Let this thread, and those that it starts, write beneath `directory` alone and run no program.

    False, and nothing is restricted, where the kernel has no Landlock.
    """
    kernel = ctypes.CDLL(None, use_errno=True)
    version = kernel.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(GET_VERSION))
    if version < 1:
        return False
    writes = WRITES | sum(bit for since, bit in LATER_WRITES.items() if version >= since)
    handled = ctypes.c_uint64(writes | EXECUTE)
    rules = kernel.syscall(CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(8), ctypes.c_uint32(0))
    place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    beneath = _Beneath(writes, place)
    failed = (
        rules < 0
        or kernel.syscall(ADD_RULE, rules, BENEATH, ctypes.byref(beneath), ctypes.c_uint32(0))
        or kernel.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        or kernel.syscall(RESTRICT_SELF, rules, ctypes.c_uint32(0))
    )
    os.close(place)
    if rules >= 0:
        os.close(rules)
    return not failed


# -------------------------------------------------------------------- the query


def main() -> int:
    """Answer on standard output. Return the exit code."""
    scratch = Path(sys.argv[1])
    request = msgspec.json.decode(
        (scratch / REQUEST_FILE).read_bytes(), type=SqlRequest, dec_hook=lambda kind, value: kind(value)
    )
    address_space = request.bounds.memory_bytes + limits.SQL_OVERHEAD_BYTES
    limit_resources(address_space, limits.SQL_SPILL_BYTES, cpu_seconds(request.bounds))
    may_write = write_only_beneath(scratch)
    threading.Thread(target=_end_with_who_asked, args=(scratch,), daemon=True).start()
    tempfile.tempdir = str(scratch)
    try:
        output, code = _sql_answer(request, may_write), 0
    except KvscopeError as error:
        output, code = bytearray(str(error).encode()), WITHOUT_ANSWER
    except MemoryError:
        text = too_large(request.bounds)
        output, code = bytearray(text.encode()), WITHOUT_ANSWER
    except RecursionError:
        output, code = bytearray(b"the query, or a value of its answer, is nested too deep"), WITHOUT_ANSWER
    except Exception as error:
        output, code = bytearray(f"the query failed: {type(error).__name__}: {error}".encode()), WITHOUT_ANSWER
    sys.stdout.buffer.write(output)
    sys.stdout.flush()
    return code


def _sql_answer(request: SqlRequest, may_write: bool) -> bytearray:
    """Return SqlRows as JSON. Raises BadQuery, BadTarget and MemoryError."""
    from .sql_tables import SqlRoom, with_answer

    room = SqlRoom(
        request.bounds.memory_bytes,
        limits.SQL_SPILL_BYTES if may_write else 0,
        # Where the kernel does not confine what is written, no file may grow.
        (lambda: None) if may_write else (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))),
    )
    return with_answer(request.query, request.source, lambda found: _encoded_rows(found, request), room)


def _encoded_rows(found: SqlAnswer, request: SqlRequest) -> bytearray:
    convert: Callable[[tuple[Any, ...]], Any]
    if request.form == "objects":
        convert = lambda row: dict(zip(found.columns, row, strict=True))  # noqa: E731
    else:
        convert = lambda row: list(map(_text, row))  # noqa: E731
    answer = bytearray(b'{"columns":' + _json(found.columns) + b',"left_out":' + _json(found.left_out) + b',"rows":[')
    separator = b""
    for row in found.rows:
        answer += separator + _json(convert(row))
        separator = b","
        if len(answer) > request.bounds.answer_bytes:
            raise BadQuery(too_long(request.bounds))
    answer += b"]}"
    return answer


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value, enc_hook=str)
    except (OverflowError, TypeError, ValueError):  # integers beyond 64 bits, keys of a map that are no texts
        return json.dumps(value, default=str, skipkeys=True).encode()


def _text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, datetime):
        return value.isoformat(sep=" ")
    return _json(value).decode() if isinstance(value, (list, dict)) else str(value)


def _end_with_who_asked(scratch: Path) -> None:
    """End this process, and remove what it wrote, when standard input ends."""
    sys.stdin.buffer.read()
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    os._exit(main())  # at once, whatever thread of DuckDB still runs
