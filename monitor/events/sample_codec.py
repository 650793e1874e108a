"""Samples, facts, reported events and KV events as payloads of a journal, beside the frames of an event stream.

A payload is `K V major minor letter` and msgpack, as a frame is, so that a reader of frames skips it as a frame type
that is newer than the reader.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvscope.monitor.events.samples import Fact, KvEvents, ReportedEvent, Sample
from kvscope.monitor.events.wire import MAGIC, MAJOR, MINOR, PREFIX

Observed = Sample | Fact | KvEvents | ReportedEvent
"""The records of a source without an event stream."""
OBSERVED_LETTERS: Final[dict[type[Observed], str]] = {Sample: "S", Fact: "F", KvEvents: "E", ReportedEvent: "R"}
OBSERVED_DECODERS: Final[dict[str, msgspec.msgpack.Decoder[Observed]]] = {
    letter: msgspec.msgpack.Decoder(cls) for cls, letter in OBSERVED_LETTERS.items()
}


def journal_payload(letter: str, body: bytes) -> bytes:
    """Return the payload of a journal record that is not a frame."""
    return MAGIC + bytes((MAJOR, MINOR)) + letter.encode() + body


def encode_observed(record: Observed) -> bytes:
    """Return a record as the payload of a journal."""
    return journal_payload(OBSERVED_LETTERS[type(record)], msgspec.msgpack.encode(record))


def decode_observed(payload: bytes) -> Observed | None:
    """Return the record in a journal's payload, or None for a frame and for anything that is damaged."""
    if len(payload) < PREFIX or payload[:2] != MAGIC or payload[2] > MAJOR:
        return None
    decoder = OBSERVED_DECODERS.get(chr(payload[PREFIX - 1]))
    try:
        return decoder.decode(payload[PREFIX:]) if decoder is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
