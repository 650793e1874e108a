"""Takes out of events what may name anybody: host, model, requests, callers' traces, and every word of an engine's
description that vLLM, SGLang or kvscope does not define (the vocabularies below). Only numbers remain.

The same name becomes the same word throughout a bundle, and another word in the next: it is hashed with a key that is
thrown away.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

import msgspec

from ..contract.description import EngineDescription, parse_description
from ..contract.kinds import Kind
from ..contract.wire import NO_REQUEST, Batch, Frame, Keyframe, NotAFrame, fives
from ..detectors.registry import catalogue
from ..ledger import keyframe_codec
from .report import HERE

ENGINES: Final = frozenset(("", "kvscope", "vllm", "sglang", "tensorrt-llm"))
DEVICES: Final = frozenset(("", "cuda", "cpu", "rocm", "hip", "xpu", "hpu", "tpu", "npu", "neuron", "mps", "auto"))
POLICIES: Final = frozenset(("", "fcfs", "priority", "lpm", "dfs-weight", "lof", "random"))
CONNECTORS: Final = frozenset(
    (
        "",
        "host",
        "peer",
        "DecodeBenchConnector",
        "ExampleConnector",
        "ExampleHiddenStatesConnector",
        "FlexKVConnectorV1",
        "HF3FSKVConnector",
        "HiSparseConnector",
        "LMCacheConnector",
        "LMCacheConnectorV1",
        "LMCacheMPConnector",
        "MoRIIOConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "MultiConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "OffloadingConnector",
        "P2pNcclConnector",
        "SharedStorageConnector",
        "SimpleCPUOffloadConnector",
    )
)
GROUP_KINDS: Final = frozenset(
    (
        "full_attention",
        "sliding_window",
        "AttentionSpec",
        "ChunkedLocalAttentionSpec",
        "CircularBufferSpec",
        "CrossAttentionSpec",
        "EncoderOnlyAttentionSpec",
        "FullAttentionSpec",
        "HiSparseHotSpec",
        "HiSparseResidentSpec",
        "HiddenStateCacheSpec",
        "KVCacheSpec",
        "MLAAttentionSpec",
        "MambaSpec",
        "RSWASpec",
        "SinkFullAttentionSpec",
        "SlidingWindowMLASpec",
        "SlidingWindowSpec",
        "TQFullAttentionSpec",
        "UniformTypeKVCacheSpecs",
    )
)
FAULT_SETTING: Final = re.compile(r"(?P<code>[a-z]+\.[a-z-]+)(?P<keys>(?::(?:every|after|limit)=\d{1,12})*)")
"""A fault of kvscope's own engine, as `--fault` takes it."""
RELEASE_NUMBER: Final = re.compile(r"\d{1,6}(?:\.\d{1,6}){0,3}(?:(?:a|b|rc|\.dev|\.post)\d{1,6}){0,3}")
"""A release's number. A build's suffix, such as `+acme.3`, may name a company."""
PORT_AND_RANK: Final = re.compile(r"\d{1,5}(?:/\d{1,5})?")
"""The end of an engine's name: its port, and its rank."""


class Redactor:
    """For one bundle. keep_ids: leave requests their names."""

    def __init__(self, key: bytes, keep_ids: bool = False) -> None:
        self._key = key
        self._keep_ids = keep_ids

    def frame(self, frame: Frame) -> Frame:
        """Return the frame, anonymized."""
        engine = self.engine(frame.engine)
        if isinstance(frame, Batch):
            texts = {
                number: self.description(text) if number == NO_REQUEST else self.request(text)
                for number, text in frame.texts.items()
            }
            return msgspec.structs.replace(frame, engine=engine, texts=texts, args=_without_traces(frame))
        return msgspec.structs.replace(frame, engine=engine, state=self._state(frame))

    def engine(self, name: str) -> str:
        """Return `model-…@host-…:8000/0` for `tiny@somewhere:8000/0`. An address of this machine identifies no one and
        stays.
        """
        model, at, where = name.rpartition("@")
        host, colon, port_and_rank = where.rpartition(":")
        if not (at and colon and PORT_AND_RANK.fullmatch(port_and_rank)):
            return self._hashed("engine", name)
        shown = host if host in HERE else self._hashed("host", host)
        return f"{self._hashed('model', model)}@{shown}:{port_and_rank}"

    def request(self, name: str) -> str:
        """Return `req-…`, or the name itself if ids are kept."""
        return name if self._keep_ids or not name else self._hashed("req", name)

    def description(self, text: str) -> str:
        """Return an engine's description: numbers, switches, and words of fixed vocabularies. Other words are
        hashed.
        """
        try:
            parsed = parse_description(text)
        except NotAFrame:
            return ""
        if parsed == EngineDescription():
            return ""
        model, served = (
            self._hashed("model", name) if name else "" for name in (parsed.model, parsed.served_model_name)
        )
        return msgspec.structs.replace(
            parsed,
            engine=self._word("engine", parsed.engine, ENGINES),
            version=self._version(parsed.version),
            model=model,
            served_model_name=served,
            device=self._word("device", parsed.device, DEVICES),
            scheduling_policy=self._word("policy", parsed.scheduling_policy, POLICIES),
            kv_connector=self._word("connector", parsed.kv_connector, CONNECTORS),
            groups=[
                msgspec.structs.replace(group, kind=self._word("kind", group.kind, GROUP_KINDS))
                for group in parsed.groups
            ],
            pid=0,
            faults=[self._fault(fault) for fault in parsed.faults],
            other={
                self._hashed("key", name): value
                for name, value in parsed.other.items()
                if isinstance(value, bool | int | float)
            },
        ).to_json()

    def _word(self, kind: str, word: str, public: frozenset[str]) -> str:
        """Return a word of a fixed vocabulary unchanged, and any other hashed."""
        return word if word in public else self._hashed(kind, word)

    def _version(self, version: str) -> str:
        match = RELEASE_NUMBER.match(version)
        number = match[0] if match is not None else ""
        rest = version.removeprefix(number)
        return f"{number}+{self._hashed('build', rest)}" if rest else number

    def _fault(self, fault: str) -> str:
        match = FAULT_SETTING.fullmatch(fault)
        return fault if match is not None and match["code"] in catalogue() else self._hashed("fault", fault)

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
        return f"{kind}-{hashlib.blake2b(f'{kind} {name}'.encode(), key=self._key, digest_size=5).hexdigest()}"


def _without_traces(batch: Batch) -> memoryview:
    """Its args, those of TRACED made 0: each event stays in its place."""
    args = bytearray(batch.args)
    at = 0
    for kind, _, _, n_args, _ in fives(batch.runs.cast("i").tolist()):
        if kind == Kind.TRACED:
            args[at : at + 8 * n_args] = bytes(8 * n_args)
        at += 8 * n_args
    return memoryview(args)
