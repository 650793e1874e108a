"""Notes of the service beside the frames, in the same journal: points of the ledger, samples, facts and KV events.

A note is `K V major minor letter` and msgpack, as a frame is, so that who reads frames only passes it over as a type of
frame from after its time (wire.py).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from kvscope.monitor.events.sample_codec import OBSERVED_DECODERS, OBSERVED_LETTERS, Observed, journal_payload
from kvscope.monitor.events.wire import PREFIX
from kvscope.monitor.ledger.engine_ledger import Point

Note = Point | Observed

LETTER_OF_POINTS: Final = "P"
_POINT_DECODER: Final[msgspec.msgpack.Decoder[Point]] = msgspec.msgpack.Decoder(Point)


class Packed(NamedTuple):
    """A note as bytes, by its letter, with `at_ns` 0 if it has no time."""

    letter: str
    at_ns: int
    body: bytes

    def note(self) -> Note | None:
        """Return the decoded note, or None for one of another release."""
        decoder = _POINT_DECODER if self.letter == LETTER_OF_POINTS else OBSERVED_DECODERS.get(self.letter)
        try:
            return decoder.decode(self.body) if decoder is not None else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


def pack(note: Note) -> bytes:
    """Return the note as bytes, to be read by its letter."""
    return msgspec.msgpack.encode(note)


def encode_note(note: Note) -> bytes:
    """Return the note as a journal's payload."""
    letter = LETTER_OF_POINTS if isinstance(note, Point) else OBSERVED_LETTERS[type(note)]
    return journal_payload(letter, pack(note))


def packed(payload: bytes) -> Packed | None:
    """Return the note in a journal's payload, or None for anything else, or an invalid time."""
    found = Packed(chr(payload[PREFIX - 1]), 0, payload[PREFIX:])
    note = found.note()
    at_ns = note.at_ns or 0 if note is not None else -1
    return found._replace(at_ns=at_ns) if 0 <= at_ns < 1 << 63 else None
