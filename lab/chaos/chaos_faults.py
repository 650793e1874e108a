"""The faults of a chaos run: how each begins and ends, what must notice it, and what it excuses."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Final

import zmq

from kvscope.monitor.probes.replay_server import AskKeyframe, encode_question

from ..faked_clock import FakedClock
from .arena import ENGINES, FIRST_PORT, PROCESSES, Arena, engine_names
from .engines_process import events_port

HOLD_S: Final = 6.0
"""Longer than the 5 s within which blindness must be reported."""
SHORT_HOLD_S: Final = 2.0


@dataclass
class ChaosFault:
    """One fault, with what it drew. `begin` and `end` it once."""

    arena: Arena
    rng: random.Random
    name: ClassVar[str] = ""
    hold_s: ClassVar[float] = HOLD_S
    kills: ClassVar[int] = 0
    """Processes that it kills: each may repeat one delivery."""
    loses_history: ClassVar[bool] = False
    """Whether what was kept before it, or is received during it, may be missing in the history."""

    def __post_init__(self) -> None:
        self.detail = self.draw()

    def draw(self) -> str:
        """Draw what the fault needs; a description."""
        return ""

    def begin(self) -> None:
        """Cause it."""

    def end(self) -> None:
        """Remove the cause."""

    def notice(self) -> Callable[[], bool] | None:
        """Return what becomes true once the fault is reported; None where nothing is hidden by it."""
        return None

    def notice_from_s(self) -> float:
        """From when on the time until it is noticed counts (monotonic), 0: from its beginning."""
        return 0.0


class _OfEngines(ChaosFault):
    process = 0

    def draw(self) -> str:
        self.process = self.rng.randrange(PROCESSES)
        return f"process {self.process}"

    def notice(self) -> Callable[[], bool] | None:
        return lambda: self.arena.does_not_see(engine_names(self.process))


class EngineKill(_OfEngines):
    """Kill -9 a process of engines, and start it again."""

    name = "engine killed"

    def begin(self) -> None:
        """Kill it."""
        self.arena.engines[self.process].kill()

    def end(self) -> None:
        """Start it again."""
        self.arena.restart_engines(self.process)


class EngineStop(_OfEngines):
    """SIGSTOP a process of engines."""

    name = "engine stopped"

    def begin(self) -> None:
        """Stop it."""
        self.arena.engines[self.process].send_signal(signal.SIGSTOP)

    def end(self) -> None:
        """Let it continue."""
        self.arena.engines[self.process].send_signal(signal.SIGCONT)


class MonitorKill(ChaosFault):
    """Kill -9 the monitor, and start it again."""

    name = "monitor killed"
    hold_s = SHORT_HOLD_S
    kills = 1

    def begin(self) -> None:
        """Kill it."""
        self.arena.monitor.kill()
        self.arena.monitor.wait()

    def end(self) -> None:
        """Start it again."""
        self.arena.restart_monitor()

    def notice(self) -> Callable[[], bool] | None:
        """An outside probe."""
        return lambda: not self.arena.is_up()


class MonitorStop(ChaosFault):
    """SIGSTOP the monitor."""

    name = "monitor stopped"

    def begin(self) -> None:
        """Stop it."""
        self.arena.monitor.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        """Let it continue."""
        self.arena.monitor.send_signal(signal.SIGCONT)

    def notice(self) -> Callable[[], bool] | None:
        """An outside probe."""
        return lambda: not self.arena.is_up()


class ReceiverKill(ChaosFault):
    """Kill -9 the receiver, and start it again."""

    name = "receiver killed"
    kills = 1

    def begin(self) -> None:
        """Kill it."""
        self.arena.receiver.kill()
        self.arena.receiver.wait()

    def end(self) -> None:
        """Start it again."""
        self.arena.restart_receiver()


class ReceiverStop(ChaosFault):
    """SIGSTOP the receiver."""

    name = "receiver stopped"

    def begin(self) -> None:
        """Stop it."""
        self.arena.receiver.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        """Let it continue."""
        self.arena.receiver.send_signal(signal.SIGCONT)


class ReceiverRefuses(ChaosFault):
    """The receiver answers 503."""

    name = "receiver refuses"

    def begin(self) -> None:
        """Refuse."""
        (self.arena.log.parent / f"{self.arena.log.name}.refuse").touch()

    def end(self) -> None:
        """Accept."""
        (self.arena.log.parent / f"{self.arena.log.name}.refuse").unlink(missing_ok=True)


OFFSETS: Final = ("+1h", "-1h", "+1d", "-1d", "+7s", "-7s")


class EngineClockJump(ChaosFault):
    """The wall clock of all engines jumps, and jumps back.

    History is asked for by wall time, so what was received in between is not compared.
    """

    name = "engines' clock jumps"
    loses_history = True

    offset = ""

    def draw(self) -> str:
        """Draw by how much."""
        self.offset = self.rng.choice(OFFSETS)
        return self.offset

    def begin(self) -> None:
        """Move it."""
        self._move(self.arena.engine_clock, self.offset)

    def end(self) -> None:
        """Move it back."""
        self._move(self.arena.engine_clock, "+0")

    @staticmethod
    def _move(clock: FakedClock | None, offset: str) -> None:
        assert clock is not None
        clock.move(offset)


class MonitorClockJump(EngineClockJump):
    """The wall clock of the monitor jumps, and jumps back."""

    name = "monitor's clock jumps"

    def begin(self) -> None:
        """Move it."""
        self._move(self.arena.monitor_clock, self.offset)

    def end(self) -> None:
        """Move it back."""
        self._move(self.arena.monitor_clock, "+0")


class _OfData(ChaosFault):
    loses_history = True
    reported: ClassVar[str] = ""

    def notice(self) -> Callable[[], bool] | None:
        return lambda: self.arena.reports_blindness(self.reported)


class FullDisk(_OfData):
    """The tmpfs of the data directory is full."""

    name = "disk full"
    reported = "No space left|disk is full"

    def begin(self) -> None:
        """Fill it."""
        self.arena.disk.fill()

    def end(self) -> None:
        """Free it."""
        self.arena.disk.free()


class ReadOnlyData(_OfData):
    """The data directory and all in it is read-only."""

    name = "data read-only"
    reported = "cannot be written|Permission denied|readonly"

    def begin(self) -> None:
        """Take the permissions."""
        for path in (self.arena.data, *self.arena.data.rglob("*")):
            with suppress(FileNotFoundError):
                path.chmod(0o500 if path.is_dir() else 0o400)

    def end(self) -> None:
        """Give them back."""
        for path in (self.arena.data, *self.arena.data.rglob("*")):
            with suppress(FileNotFoundError):
                path.chmod(0o700 if path.is_dir() else 0o600)


class DataDeleted(_OfData):
    """All in the data directory is deleted."""

    name = "data deleted"
    reported = "was deleted"

    def begin(self) -> None:
        """Delete it."""
        for path in self.arena.data.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


class LinkCut(ChaosFault):
    """No packet passes between engines and monitor."""

    name = "link cut"

    def begin(self) -> None:
        """Cut it."""
        self.arena.link.set_up(False)

    def end(self) -> None:
        """Mend it."""
        self.arena.link.set_up(True)

    def notice(self) -> Callable[[], bool] | None:
        """All engines."""
        every = tuple(name for process in range(PROCESSES) for name in engine_names(process))
        return lambda: self.arena.does_not_see(every)


class HostileAsker(ChaosFault):
    """A client floods a replay socket with questions and damage, and never reads an answer."""

    name = "hostile asker"

    def draw(self) -> str:
        """Draw the engine."""
        self.number = self.rng.randrange(ENGINES)
        self._stopping = threading.Event()
        return f"engine {self.number}"

    def begin(self) -> None:
        """Begin to flood."""
        self._thread = threading.Thread(target=self._flood)
        self._thread.start()

    def _flood(self) -> None:
        endpoint = f"tcp://127.0.0.1:{events_port(FIRST_PORT, self.number) + 1}"
        if not self.arena.link.reason:
            enter_namespace(self.arena.link.name)  # of this thread alone
        context = zmq.Context()
        sockets = [context.socket(zmq.DEALER) for _ in range(4)]
        for each in sockets:
            each.setsockopt(zmq.RCVHWM, 1)
            each.connect(endpoint)
        while not self._stopping.is_set():
            for each in sockets:
                question = encode_question(AskKeyframe()) if self.rng.random() < 0.5 else self.rng.randbytes(60)
                with suppress(zmq.Again):
                    each.send(question, zmq.NOBLOCK)
            time.sleep(0.001)
        context.destroy(linger=0)

    def end(self) -> None:
        """Stop."""
        self._stopping.set()
        self._thread.join()


def enter_namespace(name: str) -> None:
    """Move this thread to a network namespace. Threads that it starts are in it, too."""
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)


class HostilePage(ChaosFault):
    """The metrics page of an engine trickles, is huge, is garbage or fails."""

    name = "hostile page"
    hold_s = 11.0
    """A scrape comes every 5 s, and may take 4.5 s."""

    def draw(self) -> str:
        """Draw how."""
        self.how = self.rng.choice(("trickles", "garbage", "huge", "errors"))
        return self.how

    def begin(self) -> None:
        """Answer so."""
        self.arena.page.met_s = 0.0
        self.arena.page.hostile = self.how

    def end(self) -> None:
        """Answer as before."""
        self.arena.page.hostile = ""

    def notice(self) -> Callable[[], bool] | None:
        """The source of the page."""
        return self._is_reported

    def _is_reported(self) -> bool:
        if not self.arena.page.met_s:
            return False
        with suppress(Exception):
            sources = [each for each in self.arena.ask("/api/sources") if each["target"] == self.arena.page.url]
            return any(each["error"] or not each["in_step"] for each in sources)
        return False

    def notice_from_s(self) -> float:
        """From the first scrape that meets it."""
        return self.arena.page.met_s


class SecondMonitor(ChaosFault):
    """Another monitor is started with the same data directory and port."""

    name = "second monitor"
    hold_s = SHORT_HOLD_S

    def begin(self) -> None:
        """Start it."""
        self._second = self.arena.second_monitor()

    def end(self) -> None:
        """It must have ended by itself, with exit code 2."""
        code = self._second.wait(60)
        if self._second.stdout is not None:
            self._second.stdout.close()
        self.detail = f"exit code {code}"
        if code != 2:
            raise AssertionError(f"the second monitor ended with {code}")


FAULTS: Final[tuple[type[ChaosFault], ...]] = (
    EngineKill,
    EngineStop,
    MonitorKill,
    MonitorStop,
    ReceiverKill,
    ReceiverStop,
    ReceiverRefuses,
    EngineClockJump,
    MonitorClockJump,
    FullDisk,
    ReadOnlyData,
    DataDeleted,
    LinkCut,
    HostileAsker,
    HostilePage,
    SecondMonitor,
)


def possible_faults(arena: Arena) -> tuple[list[type[ChaosFault]], list[str]]:
    """Return the faults that can be caused here, and why others cannot."""
    reasons: dict[type[ChaosFault], str] = {}
    if arena.link.reason:
        reasons[LinkCut] = arena.link.reason
    if arena.disk.reason:
        reasons[FullDisk] = arena.disk.reason
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        reasons[ReadOnlyData] = "root may write everywhere, and setpriv is not installed"
    if arena.engine_clock is None:
        reasons[EngineClockJump] = reasons[MonitorClockJump] = "libfaketime is not installed"
    skipped = [f"{fault.name}: {reason}" for fault, reason in reasons.items()]
    return [fault for fault in FAULTS if fault not in reasons], skipped
