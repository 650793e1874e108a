"""The interface of every source: it is opened, polled for records and closed, and reports its status.

SourceError      the source cannot be read, or lacks the requested data
└─ BadTarget     the target on the command line names no source
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final, Protocol

import msgspec

from ..base.errors import BadTarget, CannotTell
from ..contract.samples import Record, Sample
from ..contract.wire import ContractError, Frame, encode

POLL_WAIT_S: Final = 0.25
"""How long one poll waits for records. What comes ends the wait."""
LOOK_BACK_S: Final = 600.0
"""How much of its past a followed source brings first, so that judgement does not begin from nothing."""


class SourceError(CannotTell):
    """The source cannot be read, or lacks what was asked for. The message names the remedy."""


class SourceSilent(SourceError):
    """Nothing came in time. It may still come: an engine that is frozen sends nothing either."""


def nothing_known(_engine: str, _epoch: int) -> int:
    """Return -1: no batch of that engine's epoch was received before."""
    return -1


def nothing_kept(_engine: str) -> int:
    """Return 0: no sample of that engine is kept."""
    return 0


@dataclass(frozen=True)
class SourceOptions:
    """How a source is read. Each source uses the options that apply to it.

    timeout_s: how long one request to a server may take. interval_s: between scrapes or queries, 0 for the source's
    own. follow: read on as the source grows, instead of reading its past to the end. look_back_s: how much of its past
    a followed source brings first, None for all. engine: the name to give the engine, empty for its own. known: the
    next batch that a ledger lacks of an engine's epoch, -1 if it has none. unkept: the first batch that no history has,
    -1 if that is not known. Without a ledger, reading and keeping begin there. kept_until_ns: wall time of the last
    sample of an engine that is kept and need not be read again.
    """

    timeout_s: float = 10.0
    interval_s: float = 0.0
    follow: bool = False
    look_back_s: float | None = LOOK_BACK_S
    engine: str = ""
    known: Callable[[str, int], int] = nothing_known
    unkept: Callable[[str, int], int] = nothing_known
    kept_until_ns: Callable[[str], int] = nothing_kept


class SourceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a source is. `target` shows no password. `kind` names the type of source, such as stream or metrics.

    in_step: the state is known and nothing is missing. ended: no more records will come. error: why nothing can be
    read now, empty while reading works. skipped: messages, scrapes or records left out because they could not be read.
    filled_from: batches that came late, by where from. lag_s: the newest frame's age when it arrived. last_seen_ns:
    wall time of the newest record.
    """

    target: str
    kind: str
    engines: tuple[str, ...] = ()
    in_step: bool = False
    ended: bool = False
    error: str = ""
    skipped: int = 0
    filled_from: dict[str, int] = {}
    lag_s: float | None = None
    last_seen_ns: int = 0
    notes: tuple[str, ...] = ()

    @property
    def engine(self) -> str:
        """The first engine, or an empty string while none is known."""
        return self.engines[0] if self.engines else ""


class Source(Protocol):
    """Brings records of one or more engines. One thread uses it, but `status` may be called from any thread.

    Subclass it and implement `poll` and `status`. A source that reads a server over and over reports a failed attempt
    in its status and tries again at the next poll.
    """

    has_past: bool = False
    """Whether it holds a past that can be read to its end: a recording, a log, a Prometheus server."""
    has_events: bool = False
    """Whether it brings an engine's event stream, every event of it."""
    grows: bool = True
    """Whether it can be followed."""
    sends_when_idle: bool = True
    """Whether an engine without requests is heard, too, so that silence means that none is there."""
    blocks_s: float = 0.0
    """For how long a poll may block beyond the time it is given: the timeout of a request."""

    def open(self) -> None:
        """Connect. Raises SourceError or ContractError, and may be called again after that."""
        return

    def poll(self, timeout_s: float = POLL_WAIT_S) -> Sequence[Record]:
        """Return what has come within `timeout_s`, in order. Raises SourceError or ContractError."""
        ...

    def restart(self, *, from_keyframe: bool = False) -> None:
        """Read on after a failure: what the latest poll returned was not taken in. from_keyframe: nor was it the last
        time, so leave it out if there is a way to.
        """
        return

    def status(self) -> SourceStatus:
        """Report how the source is."""
        ...

    def close(self) -> None:
        """Disconnect. May be called more than once."""
        return

    def payload_of(self, frame: Frame) -> bytes:
        """Return the bytes of a frame from the latest poll, to be kept."""
        return encode(frame)

    def bounds(self) -> tuple[int, int]:
        """Return when its past begins and ends, in wall ns, or 0 where that is not known. Raises SourceError."""
        return 0, 0

    def select(self, since_ns: int, until_ns: int) -> None:
        """Limit what the next polls read to a part of the past, where reading less is cheaper."""
        return

    def stored(self, engine: str, since_ns: int, until_ns: int) -> list[Sample]:
        """Return samples of an engine from before it was read (wall ns), where a server keeps them. Thread-safe.

        Raises SourceError.
        """
        return []

    def explain_silence(self, seconds: float) -> str:
        """Explain what to check when nothing was received for `seconds`."""
        return f"{self.status().target}: nothing was received for {seconds:.0f} s"


def until_in_step(source: Source, timeout_s: float) -> Iterator[Sequence[Record]]:
    """Open `source` and poll it until its state is known. Yield the records.

    Raises SourceError if it reports an error first, and SourceSilent if its state is not known after `timeout_s`.
    Errors of `open` and `poll` pass through.
    """
    started = monotonic()
    source.open()
    while True:
        records = source.poll(POLL_WAIT_S)
        status = source.status()
        if records:
            yield records
        if status.in_step:
            return
        if status.error:
            raise SourceError(status.error)
        if status.ended or monotonic() - started > timeout_s:
            raise SourceSilent(source.explain_silence(timeout_s))


def read_to_end(source: Source) -> Iterator[Sequence[Record]]:
    """Open `source` and read its past to the end. Errors of `open` and `poll` pass through."""
    source.open()
    while not source.status().ended:
        yield source.poll(POLL_WAIT_S)
        if error := source.status().error:
            raise SourceError(error)


READ_ERRORS: Final = (BadTarget, SourceError, ContractError)
"""The errors of reading a source."""
