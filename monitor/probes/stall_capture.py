"""The stack of the engine's thread at the moment it stops, once, and then rarely.

The drain thread checks once a second. Where a step, or the time between steps, outlives LATE_S it reads the engine's
thread from inside. Where the engine's thread holds the GIL nothing in this process can run: for that case the drain
thread keeps re-arming faulthandler's timer, a thread in C, which then writes to a file. The drain thread reports its
contents once it runs again. Until then a reader on the same machine finds them in the file (`stack_file`).

A frame is a function, its module's path below site-packages, and a line. No values are read. KVSCOPE_STACKS=0 turns
all of it off. While steps complete the engine's thread does nothing for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Final, NamedTuple

from ..contract.event_log import EventLog
from ..contract.kinds import Layer
from .packer import Vitals

logger = logging.getLogger(__name__)

STACKS_VARIABLE: Final = "KVSCOPE_STACKS"
LATE_S: Final = 3.0
"""No step of a serving engine takes this long. A prefill that does is read once, which does no harm."""
AGAIN_S: Final = (30.0, 300.0)
"""A stall that goes on is read again after the first of these, and then every so often."""
MAX_FRAMES: Final = 60
_THREAD: Final = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME: Final = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.+)$')
_ROOTS: Final = re.compile(r".*/(?:site-packages|dist-packages|lib/python3\.\d+)/")
LAYERS: Final = (
    ("kv_transfer/", Layer.CONNECTOR),
    ("kv_connector", Layer.CONNECTOR),
    ("engine/connectors/", Layer.CONNECTOR),
    ("structured_output", Layer.GRAMMAR),
    ("xgrammar/", Layer.GRAMMAR),
    ("llguidance", Layer.GRAMMAR),
    ("grammar", Layer.GRAMMAR),
    ("/sample/", Layer.SAMPLER),
    ("sampler", Layer.SAMPLER),
    ("shm_broadcast", Layer.EXECUTOR),
    ("multiproc_executor", Layer.EXECUTOR),
    ("ray_", Layer.EXECUTOR),
    ("model_executor/", Layer.MODEL),
    ("v1/worker/", Layer.MODEL),
    ("model_runner", Layer.MODEL),
    ("engine/models/", Layer.MODEL),
    ("engine/execution/", Layer.MODEL),
    ("v1/executor/", Layer.EXECUTOR),
    ("v1/core/", Layer.SCHEDULER),
    ("engine/scheduling/", Layer.SCHEDULER),
    ("engine/blocks/", Layer.SCHEDULER),
)
"""By a part of a module's path, the first that fits."""
CHECKOUT_PACKAGES: Final = ("vllm", "kvscope", "engine")
"""Packages that may run from a checkout."""


class StackFrame(NamedTuple):
    """One call: the function, its module's path and the line that runs."""

    function: str
    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({_below_packages(self.path)}:{self.line})"


class StallCapture:
    """Reads the engine's thread in this process, of which `log` is the event log.

    thread: the engine's thread's identifier, once it runs. connector_paths: modules of the KV connector, which may lie
    anywhere. Reading begins with the first `check`, in the drain thread.
    """

    def __init__(self, log: EventLog, thread: Callable[[], int | None], connector_paths: Iterable[str] = ()) -> None:
        self._log = log
        self._thread = thread
        self._connector_paths = frozenset(connector_paths)
        self._path = Path()
        self._header = ""
        self._broken = False
        self._file: IO[str] | None = None
        self._passes = -1
        self._moved_ns = 0
        self._next_ns = 0
        self._taken = 0

    def check(self, vitals: Vitals, endpoint: str) -> None:
        """Read the thread if it is late. Called at each heartbeat. `endpoint` is where the stream is published."""
        now, thread = self._log.clock.monotonic_ns(), self._thread()
        if thread is None or self._broken:
            return
        try:
            self._report_dump(vitals)
            self._arm(thread, endpoint)
        except OSError as error:
            self._broken = True
            logger.warning("no stacks are read when the engine's thread stops: %s", error)
            return
        if vitals.scheduler_passes != self._passes or not (vitals.running or vitals.waiting):
            self._passes, self._moved_ns = vitals.scheduler_passes, now
        since = vitals.in_flight_since_ns if vitals.step_in_flight >= 0 else self._moved_ns
        if now - since < LATE_S * 1e9:
            self._next_ns = self._taken = 0
        elif now >= self._next_ns:
            self._next_ns = now + round(AGAIN_S[min(self._taken, 1)] * 1e9)
            self._taken += 1
            frame = sys._current_frames().get(thread)
            self._report(vitals.step_in_flight, since, list(_frames_of(frame)))

    def close(self) -> None:
        """Stop the timer and remove the file."""
        if self._file is not None:
            faulthandler.cancel_dump_traceback_later()
            self._file.close()
            self._file = None
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _arm(self, thread: int, endpoint: str) -> None:
        if self._file is None:
            self._path = stack_file(endpoint)
            with contextlib.suppress(OSError):
                self._path.unlink()
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            self._file = os.fdopen(descriptor, "w+")
            self._header = f"{thread:x}\n{os.pathsep.join(sorted(self._connector_paths))}\n"
            self._write_header()
        faulthandler.dump_traceback_later(LATE_S, file=self._file)

    def _write_header(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        self._file.truncate()
        self._file.write(self._header)
        self._file.flush()

    def _report_dump(self, vitals: Vitals) -> None:
        """Report what the timer has written, if it has: this thread could not run for that long."""
        if self._file is None or os.fstat(self._file.fileno()).st_size <= self._file.tell():
            return
        stack = read_dump(self._path)
        self._write_header()
        if stack is not None:
            layer, text = stack
            self._log.stack(vitals.step_in_flight, vitals.in_flight_since_ns, layer, text)

    def _report(self, step: int, since_ns: int, frames: list[StackFrame]) -> None:
        text = "\n".join([*map(str, frames), *_children()])
        self._log.stack(step, since_ns, layer_of(frames, self._connector_paths), text)


def stacks_enabled() -> bool:
    """Whether stacks may be read."""
    return os.environ.get(STACKS_VARIABLE, "") != "0"


def stack_file(endpoint: str) -> Path:
    """Where the stack of an engine that holds the GIL is written, by the address of its event stream."""
    name = re.sub(r"[^0-9A-Za-z.]+", "-", endpoint.partition("://")[2])
    return Path(tempfile.gettempdir()) / f"kvscope-stack-{name}-{os.getuid()}"


def read_dump(path: Path) -> tuple[Layer, str] | None:
    """Return the layer and the stack that the timer of the engine that owns the file has written, or None if it has
    not.

    Raises nothing: a file that another user put there, or that is no dump, has no stack.
    """
    try:
        if path.stat(follow_symlinks=False).st_uid != os.getuid():
            return None
        thread, connectors, *lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return None
    frames: list[StackFrame] = []
    inside = False
    for line in lines:
        if found := _THREAD.match(line):
            inside = int(found[1], 16) == int(thread, 16) and not frames
        elif inside and (frame := _FRAME.match(line)) and len(frames) < MAX_FRAMES:
            frames.append(StackFrame(frame["function"], frame["path"], int(frame["line"])))
    if not frames:
        return None
    return layer_of(frames, frozenset(connectors.split(os.pathsep))), "\n".join(map(str, frames))


def layer_of(frames: Iterable[StackFrame], connector_paths: frozenset[str] = frozenset()) -> Layer:
    """Return the part of the engine that has the innermost call of all parts."""
    for frame in frames:
        if frame.path in connector_paths:
            return Layer.CONNECTOR
        below = _below_packages(frame.path)
        for part, layer in LAYERS:
            if part in below:
                return layer
    return Layer.UNKNOWN


def _frames_of(frame: FrameType | None) -> Iterator[StackFrame]:
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        yield StackFrame(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back


def _below_packages(path: str) -> str:
    """Return the module's path as its distribution has it, or its package's folders or name alone for one elsewhere."""
    if found := _ROOTS.match(path):
        return path[found.end() :]
    parts = Path(path).parts
    own = max(
        (index for index, part in enumerate(parts) if part in ("kvscope", "monitor", "engine", "vllm")), default=-1
    )
    return "/".join(parts[own:]) if own >= 0 else parts[-1] if parts else path


def _children() -> Iterator[str]:
    """Yield the states of this process's children, such as vLLM's workers: `process 42 VLLM::Worker: D`."""
    with contextlib.suppress(OSError):
        pids = Path(f"/proc/self/task/{threading.main_thread().native_id}/children").read_text().split()
        for pid in pids[:64]:
            with contextlib.suppress(OSError):
                name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
                yield f"process {pid} {name}: {rest.split()[0]}"
