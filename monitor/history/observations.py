"""What the service keeps beside the frames, in the same journal: points of the ledger, samples and facts of a page.

A note is `K V major minor letter` and msgpack, as a frame is, so that who reads frames only passes it over as a type of
frame from after its time (wire.py).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from kvscope.monitor.events.samples import Fact, Sample
from kvscope.monitor.events.wire import MAGIC, MAJOR, MINOR, PREFIX
from kvscope.monitor.ledger.engine_ledger import Point

Note = Point | Sample | Fact

LETTER_OF_POINTS: Final = "P"
_LETTERS: Final[dict[type[Note], bytes]] = {Point: LETTER_OF_POINTS.encode(), Sample: b"S", Fact: b"F"}
_DECODERS: Final[dict[str, msgspec.msgpack.Decoder[Note]]] = {
    letter.decode(): msgspec.msgpack.Decoder(cls) for cls, letter in _LETTERS.items()
}


class Packed(NamedTuple):
    """A note as bytes, by its letter; `at_ns` 0 if it has no time."""

    letter: str
    at_ns: int
    body: bytes

    def note(self) -> Note | None:
        """What it says; None for what another release keeps."""
        decoder = _DECODERS.get(self.letter)
        try:
            return decoder.decode(self.body) if decoder is not None else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


def pack(note: Note) -> bytes:
    """The note as bytes, to be read by its letter."""
    return msgspec.msgpack.encode(note)


def encode_note(note: Note) -> bytes:
    """The note as a journal's payload."""
    return MAGIC + bytes((MAJOR, MINOR)) + _LETTERS[type(note)] + pack(note)


def packed(payload: bytes) -> Packed | None:
    """The note in a journal's payload; None for what is none."""
    found = Packed(chr(payload[PREFIX - 1]), 0, payload[PREFIX:])
    note = found.note()
    return found._replace(at_ns=note.at_ns or 0) if note is not None else None
