"""vLLM's KV events over ZeroMQ: the contents of its prefix cache, from any vLLM since 0.9 that publishes them.

A source reads one publisher's batches in order, its replay first, or those of all that a server names. A message is
[topic, sequence, payload], the sequence eight bytes, big-endian. The payload is a batch in msgpack: up to 0.23 arrays,
`[ts, [["BlockStored", hashes, parent, tokens, …], …], rank]`, since then maps with the same names. The replay socket
takes ["", sequence] and answers with the batches from there on, ["", sequence, payload], with the topic before the
sequence since 0.26. A sequence of -1 ends the answer. So a message is read from its end.

Token ids are never decoded: they are skipped as bytes, and what is kept of a block is its hash.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
import zmq

from ..base import limits
from ..base.bounded_http import BoundedClient, HttpFailed, status_text
from ..base.errors import KvscopeError
from ..base.http_url import address_of, shown
from ..base.text import counted
from ..contract.event_log import Clock
from ..contract.samples import KvEvent, KvEvents, Record
from ..contract.wire import ContractError
from ..probes.publisher import replay_endpoint_for
from .source import POLL_WAIT_S, Source, SourceStatus
from .source_sockets import SourceSockets
from .targets import TargetKind

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


END: Final = -1
HISTORY_S: Final = 1.0
"""How long the replay socket may be silent before what it has is taken for complete, or for not there."""
MAX_WAITING_BATCHES: Final = 100_000


class KvEndpoint(NamedTuple):
    """Where one data-parallel rank publishes. `replay` may be empty: it then keeps no past. `rank` None: its messages
    name it.
    """

    events: str
    replay: str
    name: str
    rank: int | None = None


def discover_kv_endpoints(url: str, timeout_s: float) -> list[KvEndpoint]:
    """Return the publishers behind a vLLM's `/kv_event_sources`. Raises ContractError, saying what to do, and BadTarget
    for what is not an address.
    """
    address = address_of(url)
    try:
        with BoundedClient(timeout_s) as client:
            answer = client.ask("GET", address)
        if answer.status == HTTPStatus.NOT_FOUND:
            raise ContractError(
                f"{shown(url)} answers 404 Not Found: this server does not name its KV events' address, as an older"
                " vLLM may not (0.32 does). Name the stream itself: tcp://HOST:5557"
            )
        if not answer.is_success:
            raise HttpFailed(f"answers {status_text(answer.status)}")
        sources = answer.decoded(list[_AnnouncedEndpoint])
    except HttpFailed as error:
        raise ContractError(f"{shown(url)} {error}: it does not name the address of its KV events") from error
    if not sources:
        raise ContractError(
            f"{shown(url)}: this engine publishes no KV events. It does with --kv-events-config"
            ' \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint":'
            ' "tcp://*:5558"}\' and prefix caching on'
        )
    return [
        KvEndpoint(
            _reachable(source.endpoint, address.host),
            _reachable(source.replay_endpoint or "", address.host),
            f"vllm@{address.netloc}",
            source.data_parallel_rank,
        )
        for source in sources
    ]


class _AnnouncedEndpoint(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None
    data_parallel_rank: int | None = None


def _reachable(endpoint: str, host: str) -> str:
    """Return an address to connect to for a bound one: any interface means the host that answered."""
    for anywhere in ("//*:", "//0.0.0.0:", "//[::]:"):
        endpoint = endpoint.replace(anywhere, f"//{f'[{host}]' if ':' in host else host}:")
    return endpoint


def kv_endpoint_at(endpoint: str) -> KvEndpoint:
    """Return the publisher at a configured endpoint. Its replay is where vLLM's examples have it, one port on."""
    address = urlsplit(endpoint)
    return KvEndpoint(endpoint, replay_endpoint_for(endpoint), f"vllm@{address.netloc or address.path}")


class KvEventStream:
    """One publisher's batches, in their order: what it still has of the past first. One thread only.

    Raises ContractError for what is not an endpoint.
    """

    def __init__(self, publisher: KvEndpoint, clock: Clock = time) -> None:
        self.publisher = publisher
        self.batches = 0
        self.bad_messages = 0
        """Messages that were no batch of KV events, counted and left out."""
        self.lost = 0
        """Batches that were published and never came, once we had one."""
        self.replayed = 0
        self._clock = clock
        self._next = -1
        self._last_sequence = -1
        """The last one published, apart from those of the past: it goes back when the engine restarts."""
        self._asked_for = 0
        self._waiting: list[tuple[int, bytes]] = []
        self._sockets = SourceSockets()
        try:
            self._sub = self._sockets.add(zmq.SUB)
            self._sub.setsockopt(zmq.RCVHWM, MAX_WAITING_BATCHES)
            self._sub.setsockopt(zmq.SUBSCRIBE, b"")
            self._sub.connect(publisher.events)
            self._dealer = self._sockets.add(zmq.DEALER)
            self._dealer.setsockopt(zmq.RCVHWM, MAX_WAITING_BATCHES)
            if publisher.replay:
                self._dealer.connect(publisher.replay)
        except zmq.ZMQError as error:
            self._sockets.close()
            raise ContractError(f"{publisher.events} is not an endpoint to connect to: {error.strerror}") from error
        self._asking, self._asked_ns = False, 0
        if publisher.replay:
            self._ask(0)

    def close(self) -> None:
        """Disconnect."""
        self._sockets.close()

    def poll(self, timeout_s: float = 0.1) -> list[KvEvents]:
        """Return the batches within the time, in order. A batch after an unfillable gap has the number of missing
        ones.
        """
        ready = self._sockets.poll(timeout_s)
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
        for _ in range(MAX_WAITING_BATCHES):
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
        for _ in range(MAX_WAITING_BATCHES - len(self._waiting)):
            try:
                parts = self._sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if is_kv_batch(parts):
                self._waiting.append((int.from_bytes(parts[1], "big", signed=True), parts[2]))
            else:
                self.bad_messages += 1

    def _release(self, out: list[KvEvents]) -> None:
        """Release published batches. At a gap, ask once for the missing ones and wait for them."""
        for index, (sequence, payload) in enumerate(self._waiting):
            restarted = sequence <= self._last_sequence
            if sequence > self._next >= 0 and not restarted and self.publisher.replay and self._asked_for != self._next:
                self._ask(self._next)
                del self._waiting[:index]
                return
            self._last_sequence = sequence
            if restarted or sequence >= self._next:
                self._place(sequence, payload, out, restarted)
        self._waiting.clear()

    def _place(self, sequence: int, payload: bytes, out: list[KvEvents], restarted: bool = False) -> None:
        lost = sequence - self._next if self._next >= 0 and not restarted else 0
        self._next = sequence + 1
        self.lost += lost
        try:
            at_ns, events, rank = decode_kv_events(payload)
        except NotKvEvents:
            self.bad_messages += 1
            return
        self.batches += 1
        name, known = self.publisher.name, self.publisher.rank
        out.append(
            KvEvents(f"{name}/{rank if known is None else known}", str(sequence), at_ns, events, lost, restarted)
        )


class KvEventSource(Source):
    """The KV events of every publisher that `find` returns, called when it is opened."""

    sends_when_idle = False

    def __init__(self, target: str, find: Callable[[], Sequence[KvEndpoint]]) -> None:
        self._target = shown(target)
        self._find = find
        self._streams: list[KvEventStream] = []
        self._engines: dict[str, None] = {}
        self._last_ns = 0

    def open(self) -> None:
        """Connect to the publishers. Raises SourceError or ContractError where there are none."""
        if not self._streams:
            with contextlib.ExitStack() as opened:
                streams = [opened.enter_context(contextlib.closing(KvEventStream(each))) for each in self._find()]
                opened.pop_all()
            self._streams = streams

    def poll(self, timeout_s: float = POLL_WAIT_S) -> Sequence[Record]:
        """Return what the publishers still have of their past first, then what they publish."""
        records = [event for stream in self._streams for event in stream.poll(timeout_s / len(self._streams))]
        self._engines |= dict.fromkeys(record.engine for record in records)
        self._last_ns = max([self._last_ns, *(record.at_ns for record in records)])
        return records

    def status(self) -> SourceStatus:
        """Report how the streams are."""
        notes = []
        for stream in self._streams:
            if stream.bad_messages:
                notes.append(f"{stream.bad_messages} messages were no KV events and were left out")
            if stream.lost:
                lost = counted(stream.lost, "batch", "batches")
                notes.append(f"{lost} never came: what was kept before is forgotten")
        return SourceStatus(
            target=self._target,
            kind=TargetKind.KV_EVENTS,
            engines=tuple(self._engines),
            in_step=any(stream.batches for stream in self._streams),
            skipped=sum(stream.bad_messages for stream in self._streams),
            filled_from={"replay": replayed} if (replayed := sum(each.replayed for each in self._streams)) else {},
            last_seen_ns=self._last_ns,
            notes=tuple(notes),
        )

    def explain_silence(self, seconds: float) -> str:
        """Explain what to check when no KV event came for `seconds`."""
        return (
            f"{self._target}: no KV event came for {seconds:.0f} s, and no replay socket has any. They come only"
            " while requests run and prefix caching is on; an endpoint without * in it, or an address of an"
            " interface, makes vLLM connect instead of bind, and then no reader receives them"
        )

    def close(self) -> None:
        """Disconnect."""
        for stream in self._streams:
            stream.close()
        self._streams = []
