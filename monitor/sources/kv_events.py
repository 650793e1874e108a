"""vLLM's KV events over ZeroMQ: what its prefix cache keeps, from any vLLM since 0.9 that was told to publish them.

A message is [topic, sequence, payload], the sequence eight bytes, big-endian. The payload is a batch in msgpack: up to
0.23 arrays, `[ts, [["BlockStored", hashes, parent, tokens, …], …], rank]`, since then maps with the same names. The
replay socket takes ["", sequence] and answers with the batches from there on, ["", sequence, payload], with the topic
before the sequence since 0.26; a sequence of -1 ends the answer. So a message is read from its end.

Token ids are never decoded: they are skipped as bytes, and what is kept of a block is its hash.
"""

from __future__ import annotations

import contextlib
import time
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec
import zmq

from kvscope.monitor.errors import KvscopeError
from kvscope.monitor.events.event_log import Clock
from kvscope.monitor.events.samples import KvEvent, KvEvents
from kvscope.monitor.events.wire import ContractError
from kvscope.monitor.publishing.publisher import replay_endpoint_for
from kvscope.monitor.sources.exposition import address_of, shown

DEVICE: Final = "GPU"
"""vLLM's word for where blocks are that a request can run on, on any device; what other tiers keep is left out."""
END: Final = -1
HISTORY_S: Final = 1.0
"""How long the replay socket may be silent before what it has is taken for said, or for not there."""
MAX_BUFFERED: Final = 100_000

Hash = int | bytes


class _Batch(msgspec.Struct):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _Event(msgspec.Struct):
    """Any event as a map; fields that are not named here are skipped."""

    type: str
    block_hashes: list[Hash] = []
    parent_block_hash: Hash | None = None
    medium: str | None = None
    group_idx: int | None = None


class _Stored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: msgspec.Raw = msgspec.Raw()
    medium: str | None = None
    lora_name: msgspec.Raw = msgspec.Raw()
    extra_keys: msgspec.Raw = msgspec.Raw()
    group_idx: int | None = None


class _Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


_BATCH: Final = msgspec.msgpack.Decoder(_Batch)
_ARRAY_BATCH: Final = msgspec.msgpack.Decoder(_ArrayBatch)
_EVENT: Final = msgspec.msgpack.Decoder(_Event)
_ARRAY_EVENT: Final = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)


class NotKvEvents(KvscopeError):
    """A message that is no batch of KV events; the message says why."""


class Publisher(NamedTuple):
    """Where one data-parallel rank publishes. `replay` may be empty: it then keeps no past. `rank` None: it says it."""

    events: str
    replay: str
    name: str
    rank: int | None = None


def is_batch(parts: list[bytes]) -> bool:
    """Whether a message that was published looks like KV events: kvscope's own have two parts."""
    return len(parts) == 3 and len(parts[1]) == 8


def decode(payload: bytes) -> tuple[int, list[KvEvent], int]:
    """A batch: wall time in ns, its events on the device, and its rank. Raises NotKvEvents."""
    try:
        batch = (_BATCH if _is_map(payload) else _ARRAY_BATCH).decode(payload)
        at_ns = int(batch.ts * 1e9)
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


def publishers(url: str, timeout_s: float) -> list[Publisher]:
    """Who publishes behind a vLLM's `/kv_event_sources`. Raises ContractError, saying what to do, and BadTarget for
    what is no address.
    """
    address = address_of(url)
    try:
        answer = httpx.get(address, timeout=timeout_s, trust_env=False, follow_redirects=True)
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise ContractError(
                f"{shown(url)} answers 404 Not Found: this server does not tell where KV events are, as an older vLLM"
                " may not (0.32 does). Name the stream itself: tcp://HOST:5557"
            )
        answer.raise_for_status()
        sources = msgspec.json.decode(answer.content, type=list[_Source])
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        raise ContractError(f"{shown(url)}: it does not tell where KV events are: {shown(str(error))}") from error
    if not sources:
        raise ContractError(
            f"{shown(url)}: this engine publishes no KV events. It does with --kv-events-config"
            ' \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint":'
            ' "tcp://*:5558"}\' and prefix caching on'
        )
    return [
        Publisher(
            _reachable(source.endpoint, address.host),
            _reachable(source.replay_endpoint or "", address.host),
            f"vllm@{address.netloc.decode()}",
            source.data_parallel_rank,
        )
        for source in sources
    ]


class _Source(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None
    data_parallel_rank: int | None = None


def _reachable(endpoint: str, host: str) -> str:
    """An address to connect to, of one that was bound: any interface means the host that answered."""
    for anywhere in ("//*:", "//0.0.0.0:", "//[::]:"):
        endpoint = endpoint.replace(anywhere, f"//{f'[{host}]' if ':' in host else host}:")
    return endpoint


def publisher_at(endpoint: str) -> Publisher:
    """The publisher at an endpoint that somebody named; its replay is where vLLM's examples have it, one port on."""
    address = urlsplit(endpoint)
    return Publisher(endpoint, replay_endpoint_for(endpoint), f"vllm@{address.netloc or address.path}")


class KvEventStream:
    """One publisher's batches, in their order: what it still has of the past first. One thread only.

    Raises ContractError for what is no endpoint.
    """

    def __init__(self, publisher: Publisher, clock: Clock = time) -> None:
        self.publisher = publisher
        self.batches = 0
        self.bad_messages = 0
        """What was no batch of KV events, counted and left out."""
        self.lost = 0
        """Batches that were published and never came, once we had one."""
        self.replayed = 0
        self._clock = clock
        self._next = -1
        self._heard = -1
        """The last that was published, as against those of the past: it goes back when the engine is started anew."""
        self._asked_for = 0
        self._waiting: list[tuple[int, bytes]] = []
        self._context = zmq.Context()
        try:
            self._sub = self._context.socket(zmq.SUB)
            self._sub.setsockopt(zmq.RCVHWM, MAX_BUFFERED)
            self._sub.setsockopt(zmq.SUBSCRIBE, b"")
            self._sub.connect(publisher.events)
            self._dealer = self._context.socket(zmq.DEALER)
            self._dealer.setsockopt(zmq.RCVHWM, MAX_BUFFERED)
            if publisher.replay:
                self._dealer.connect(publisher.replay)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ContractError(f"{publisher.events} is no endpoint to connect to: {error.strerror}") from error
        self._poller = zmq.Poller()
        self._poller.register(self._sub, zmq.POLLIN)
        self._poller.register(self._dealer, zmq.POLLIN)
        self._asking, self._asked_ns = False, 0
        if publisher.replay:
            self._ask(0)

    def close(self) -> None:
        """Disconnect."""
        self._context.destroy(linger=0)

    def poll(self, timeout_s: float = 0.1) -> list[KvEvents]:
        """What has come within the time, in order; a batch after a gap that nobody could fill says what it lacks."""
        ready = dict(self._poller.poll(round(timeout_s * 1000)))
        out: list[KvEvents] = []
        if self._dealer in ready:
            self._take_history(out)
        if self._sub in ready:
            self._take_published()
        if self._asking and self._clock.monotonic_ns() - self._asked_ns > HISTORY_S * 1e9:
            self._asking = False
        if not self._asking:
            self._release(out)
        return out

    def _ask(self, sequence: int) -> None:
        self._asking, self._asked_for, self._asked_ns = True, sequence, self._clock.monotonic_ns()
        with contextlib.suppress(zmq.Again):
            self._dealer.send_multipart([b"", sequence.to_bytes(8, "big")], zmq.NOBLOCK)

    def _take_history(self, out: list[KvEvents]) -> None:
        for _ in range(MAX_BUFFERED):
            try:
                parts = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._asked_ns = self._clock.monotonic_ns()
            if len(parts) < 3 or len(parts[-2]) != 8:
                self.bad_messages += 1
                continue
            sequence = int.from_bytes(parts[-2], "big", signed=True)
            if sequence == END:
                self._asking = False
                return
            if sequence >= self._next:
                self.replayed += 1
                self._place(sequence, parts[-1], out)

    def _take_published(self) -> None:
        for _ in range(MAX_BUFFERED - len(self._waiting)):
            try:
                parts = self._sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if is_batch(parts):
                self._waiting.append((int.from_bytes(parts[1], "big", signed=True), parts[2]))
            else:
                self.bad_messages += 1

    def _release(self, out: list[KvEvents]) -> None:
        """Put out what was published; at a gap, ask once for what lies in it and wait for that."""
        for index, (sequence, payload) in enumerate(self._waiting):
            restarted = sequence <= self._heard
            if sequence > self._next >= 0 and not restarted and self.publisher.replay and self._asked_for != self._next:
                self._ask(self._next)
                del self._waiting[:index]
                return
            self._heard = sequence
            if restarted or sequence >= self._next:
                self._place(sequence, payload, out, restarted)
        self._waiting.clear()

    def _place(self, sequence: int, payload: bytes, out: list[KvEvents], restarted: bool = False) -> None:
        lost = sequence - self._next if self._next >= 0 and not restarted else 0
        self._next = sequence + 1
        self.lost += lost
        try:
            at_ns, events, rank = decode(payload)
        except NotKvEvents:
            self.bad_messages += 1
            return
        self.batches += 1
        name, known = self.publisher.name, self.publisher.rank
        out.append(
            KvEvents(f"{name}/{rank if known is None else known}", str(sequence), at_ns, events, lost, restarted)
        )
