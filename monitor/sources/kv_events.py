"""vLLM's KV events over ZeroMQ: the contents of its prefix cache, from any vLLM since 0.9 that publishes them.

A message is [topic, sequence, payload], the sequence eight bytes, big-endian. The payload is a batch in msgpack: up to
0.23 arrays, `[ts, [["BlockStored", hashes, parent, tokens, …], …], rank]`, since then maps with the same names. The
replay socket takes ["", sequence] and answers with the batches from there on, ["", sequence, payload], with the topic
before the sequence since 0.26. A sequence of -1 ends the answer. So a message is read from its end.

Token ids are never decoded: they are skipped as bytes, and what is kept of a block is its hash.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvscope.monitor.errors import KvscopeError
from kvscope.monitor.events import limits
from kvscope.monitor.events.samples import KvEvent

DEVICE: Final = "GPU"
"""vLLM's word for where blocks are that a request can run on, on any device. Blocks of other tiers are left out."""

BlockHash = int | bytes


class _Batch(msgspec.Struct):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _Event(msgspec.Struct):
    """Any event as a map, without fields that are not named here."""

    type: str
    block_hashes: list[BlockHash] = []
    parent_block_hash: BlockHash | None = None
    medium: str | None = None
    group_idx: int | None = None


class _Stored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: msgspec.Raw = msgspec.Raw()
    medium: str | None = None
    lora_name: msgspec.Raw = msgspec.Raw()
    extra_keys: msgspec.Raw = msgspec.Raw()
    group_idx: int | None = None


class _Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


_BATCH: Final = msgspec.msgpack.Decoder(_Batch)
_ARRAY_BATCH: Final = msgspec.msgpack.Decoder(_ArrayBatch)
_EVENT: Final = msgspec.msgpack.Decoder(_Event)
_ARRAY_EVENT: Final = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)


class NotKvEvents(KvscopeError):
    """A message that is no batch of KV events. The error gives the reason."""


def is_kv_batch(parts: list[bytes]) -> bool:
    """Whether a message that was published looks like KV events: kvscope's own have two parts."""
    return len(parts) == 3 and len(parts[1]) == 8


def decode_kv_events(payload: bytes) -> tuple[int, list[KvEvent], int]:
    """Decode a batch: wall time in ns, its events on the device, and its rank. Raises NotKvEvents."""
    try:
        batch = (_BATCH if _is_map(payload) else _ARRAY_BATCH).decode(payload)
        at_ns = int(batch.ts * 1e9)
        if not 0 <= at_ns < limits.TIME_NS:
            raise NotKvEvents("its time is not one of this or the next century")
        events = [event for raw in batch.events if (event := _event(bytes(raw))) is not None]
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise NotKvEvents(str(error)) from error
    return at_ns, events, batch.data_parallel_rank or 0


def _event(payload: bytes) -> KvEvent | None:
    if _is_map(payload):
        named = _EVENT.decode(payload)
        medium, what, hashes, parent = named.medium, named.type, named.block_hashes, named.parent_block_hash
        group = named.group_idx
    else:
        match _ARRAY_EVENT.decode(payload):
            case _Stored() as stored:
                medium, what, hashes, group = stored.medium, "BlockStored", stored.block_hashes, stored.group_idx
                parent = stored.parent_block_hash
            case _Removed() as removed:
                medium, what, hashes, group = removed.medium, "BlockRemoved", removed.block_hashes, removed.group_idx
                parent = None
            case _:
                return KvEvent("cleared")
    if what == "AllBlocksCleared":
        return KvEvent("cleared")
    if what not in ("BlockStored", "BlockRemoved") or (medium or DEVICE) != DEVICE:
        return None
    return KvEvent("stored" if what == "BlockStored" else "removed", hashes, parent, group or 0)


def _is_map(payload: bytes) -> bool:
    return bool(payload) and (0x80 <= payload[0] <= 0x8F or payload[0] in (0xDE, 0xDF))
