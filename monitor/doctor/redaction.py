"""Takes out of events what names anybody: host, model, requests, callers' traces. What is left is numbers.

The same name becomes the same word throughout a bundle, and another word in the next: it is hashed with a key that is
thrown away.
"""

from __future__ import annotations

import hashlib
import socket

import msgspec

from kvscope.monitor.doctor.merged_findings import HERE
from kvscope.monitor.events.description import EngineDescription, parse_description
from kvscope.monitor.events.kinds import Kind
from kvscope.monitor.events.wire import NO_REQUEST, Batch, Frame, Keyframe, NotAFrame, fives
from kvscope.monitor.state import keyframe_codec


class Redactor:
    """For one bundle. keep_ids: leave requests their names."""

    def __init__(self, key: bytes, keep_ids: bool = False) -> None:
        self._key = key
        self._keep_ids = keep_ids
        self._names = {name for name in (socket.gethostname(), socket.getfqdn()) if name not in HERE}
        """What must not be left in any text: this machine's names, and whatever was replaced."""

    def frame(self, frame: Frame) -> Frame:
        """The same, of nobody."""
        engine = self.engine(frame.engine)
        if isinstance(frame, Batch):
            texts = {
                number: self.description(text) if number == NO_REQUEST else self.request(text)
                for number, text in frame.texts.items()
            }
            return msgspec.structs.replace(frame, engine=engine, texts=texts, args=_without_traces(frame))
        return msgspec.structs.replace(frame, engine=engine, state=self._state(frame))

    def engine(self, name: str) -> str:
        """`model-…@host-…:8000/0` of `tiny@somewhere:8000/0`; an address of this machine names nobody and stays."""
        model, at, where = name.rpartition("@")
        host, colon, port_and_rank = where.rpartition(":")
        if not (at and colon):
            return self._hashed("engine", name)
        shown = host if host in HERE else self._hashed("host", host)
        return f"{self._hashed('model', model)}@{shown}:{port_and_rank}"

    def request(self, name: str) -> str:
        """`req-…`, or as it is if ids are kept."""
        return name if self._keep_ids or not name else self._hashed("req", name)

    def description(self, text: str) -> str:
        """Of what an engine says of itself: figures, switches, and the words that are of a small vocabulary."""
        try:
            told = parse_description(text)
        except NotAFrame:
            return ""
        if told == EngineDescription():
            return ""
        model, served = (self._hashed("model", name) if name else "" for name in (told.model, told.served_model_name))
        words = ("engine", "version", "device", "scheduling_policy", "kv_connector")
        return msgspec.structs.replace(
            told,
            model=model,
            served_model_name=served,
            pid=0,
            faults=[self._scrubbed(fault) for fault in told.faults],
            other={name: value for name, value in told.other.items() if isinstance(value, bool | int | float)},
            **{word: self._scrubbed(getattr(told, word)) for word in words},
        ).to_json()

    def _state(self, keyframe: Keyframe) -> memoryview:
        state = keyframe_codec.load_state(keyframe.state)
        state.description = self.description(state.description)
        for record in state.requests.values():
            record.id, record.trace = self.request(record.id), None
        state.deferrals = {
            number: msgspec.structs.replace(deferral, id=self.request(deferral.id))
            for number, deferral in state.deferrals.items()
        }
        return keyframe_codec.dump_state(state)

    def _hashed(self, kind: str, name: str) -> str:
        self._names.add(name)
        return f"{kind}-{hashlib.blake2b(f'{kind} {name}'.encode(), key=self._key, digest_size=5).hexdigest()}"

    def _scrubbed(self, text: str) -> str:
        for name in sorted(filter(None, self._names), key=len, reverse=True):
            text = text.replace(name, "redacted")
        return text


def _without_traces(batch: Batch) -> memoryview:
    """Its args, those of TRACED made 0: each event stays in its place."""
    args = bytearray(batch.args)
    at = 0
    for kind, _, _, n_args, _ in fives(batch.runs.cast("i").tolist()):
        if kind == Kind.TRACED:
            args[at : at + 8 * n_args] = bytes(8 * n_args)
        at += 8 * n_args
    return memoryview(args)
