"""A KV connector between two engines on one machine: one computes prompts, the other goes on from there.

    the one that prefills                                  the one that decodes
    ----------------------------------------------------   ---------------------------------------------------
    a request asked with do_remote_decode ends: its full
    blocks are kept, for a lease, and offered in the answer
                                                           a request comes with that offer: it gets blocks, is
                                                           parked, and asks: fetch
    reads the blocks and sends them: kv (or: refused)
                                                           writes them to its own, sends: done. The request is ready
    the blocks are free

Every engine can be both. One thread does all of it over ZeroMQ, beside the engine's own. A fetch fails if it does not
come within `timeout_s`, is refused, or does not fit. The prompt is then computed where it is.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

import msgspec
import torch
import zmq
from torch import Tensor

from kvscope.monitor.contract.event_log import EventLog

from ..requests.request import KVTransferParams, Request
from .base import KVLoad

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_S: Final = 10.0
"""Longer than any transfer within one machine takes."""
LOOK_EVERY_MS: Final = 100
"""At least so often the thread sees whether a fetch is overdue."""
DEFAULT_ENDPOINT: Final = "tcp://127.0.0.1:*"


class _Header(msgspec.Struct):
    """The header before the bytes, if there are any: fetch, kv, refused or done, of which offer, and the KV's form."""

    kind: str
    offer: str
    first: int = 0
    count: int = 0
    shape: list[int] = []
    dtype: str = ""
    why: str = ""


_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODE: Final = msgspec.msgpack.Decoder(_Header).decode


@dataclass
class _Offer:
    """A finished request's blocks, kept until they are fetched."""

    request: int
    blocks: list[int]


@dataclass
class _PeerFetch:
    """A fetch under way: where its KV goes, and when it is given up, in monotonic seconds."""

    request: int
    blocks: list[int]
    first: int
    endpoint: str
    offer: str
    deadline: float


class PeerConnector:
    """Offers KV at `endpoint` (a port of * picks a free one), and fetches what other engines offer.

    gather and scatter: ModelRunner's, called in the connector's thread for blocks that no step writes to meanwhile.
    block_size: tokens in a block. wake: called in that thread when a fetch has ended. Raises ValueError if the
    endpoint cannot be bound.
    """

    def __init__(
        self,
        gather: Callable[[list[int]], Tensor],
        scatter: Callable[[list[int], Tensor], None],
        *,
        block_size: int,
        log: EventLog,
        wake: Callable[[], None],
        endpoint: str = DEFAULT_ENDPOINT,
        timeout_s: float = FETCH_TIMEOUT_S,
    ) -> None:
        self.polls = 0
        self.log = log
        self._gather = gather
        self._scatter = scatter
        self._block_size = block_size
        self._wake = wake
        self.timeout_s = timeout_s
        one = gather([0])
        self._form = list(one.shape), str(one.dtype)
        self._lock = threading.Lock()
        self._offers: dict[str, _Offer] = {}
        self._reported_done: set[int] = set()
        self._jobs: SimpleQueue[_PeerFetch | tuple[str, str] | None] = SimpleQueue()
        self._fetched: SimpleQueue[tuple[int, bool]] = SimpleQueue()
        self._done: SimpleQueue[int] = SimpleQueue()
        self._context = zmq.Context()
        self._serving = self._context.socket(zmq.ROUTER)
        self._serving.linger = 0
        try:
            self._serving.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy()
            raise ValueError(f"KV cannot be offered at {endpoint}: {error.strerror}") from error
        self.endpoint = self._serving.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where KV is offered."""
        self._bell, self._ringing = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._bell.bind("inproc://jobs")
        self._ringing.connect("inproc://jobs")
        # Only of the thread: fetches by offer, and a connection to each engine that was fetched from.
        self._fetches: dict[str, _PeerFetch] = {}
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._thread = threading.Thread(target=self._work, name="kvscope-peer-kv", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- the engine's thread

    def find(self, request: Request, first: int, end: int) -> int:
        """See KVConnector: what the other engine offers of this request. Once, and not again after a preemption."""
        asked = request.kv_transfer
        if asked is None or not asked.do_remote_prefill or request.num_preemptions:
            return 0
        count = min(end, asked.remote_num_blocks) - first
        if count <= 0 and request.number not in self._reported_done:
            # All of it is here already: the other engine need not keep it.
            self._reported_done.add(request.number)
            self._ask((asked.remote_endpoint, asked.remote_request_id))
        return max(0, count)

    def start_load(self, load: KVLoad) -> None:
        """See KVConnector."""
        asked = load.request.kv_transfer
        assert asked is not None
        self._ask(
            _PeerFetch(
                load.request.number,
                load.blocks,
                load.first,
                asked.remote_endpoint,
                asked.remote_request_id,
                time.monotonic() + self.timeout_s,
            )
        )

    def loaded(self) -> list[tuple[int, bool]]:
        """See KVConnector."""
        return [self._fetched.get() for _ in range(self._fetched.qsize())]

    def request_finished(self, request: Request, blocks: list[int]) -> bool:
        """See KVConnector: keeps the full blocks of one that another engine will go on with, and makes the offer."""
        self._reported_done.discard(request.number)
        full = request.num_prompt_tokens // self._block_size
        if request.kv_transfer is None or not request.kv_transfer.do_remote_decode or not full:
            return False
        offer = secrets.token_hex(16)
        request.kv_offer = KVTransferParams(
            do_remote_prefill=True, remote_endpoint=self.endpoint, remote_request_id=offer, remote_num_blocks=full
        )
        with self._lock:
            self._offers[offer] = _Offer(request.number, list(blocks[:full]))
        return True

    def completed(self) -> list[int]:
        """See KVConnector."""
        self.polls += 1
        return [self._done.get() for _ in range(self._done.qsize())]

    def lease_ended(self, number: int) -> None:
        """See KVConnector: the offer stands no longer."""
        with self._lock:
            self._offers = {key: offer for key, offer in self._offers.items() if offer.request != number}

    def close(self) -> None:
        """Stop. Fetches under way fail."""
        self._ask(None)
        self._thread.join()
        self._context.destroy(linger=0)

    def _ask(self, job: _PeerFetch | tuple[str, str] | None) -> None:
        self._jobs.put(job)
        self._ringing.send(b"")

    # ---------------------------------------------------------------- the connector's thread

    def _work(self) -> None:
        while True:
            sockets = [self._bell, self._serving, *self._peers.values()]
            ready, _, _ = zmq.select(sockets, [], [], LOOK_EVERY_MS / 1000)
            for socket in ready:
                if socket is self._serving:
                    self._serve(*socket.recv_multipart())
                elif socket is not self._bell:
                    self._receive(socket.recv_multipart())
            if self._bell in ready:
                self._bell.recv()
                job = self._jobs.get()
                if job is None:
                    break
                self._begin(job)
            for fetch in [f for f in self._fetches.values() if time.monotonic() > f.deadline]:
                self._fail(fetch, f"nothing came within {self.timeout_s:g} s")
        for fetch in list(self._fetches.values()):
            self._fail(fetch, "this engine stops")

    def _begin(self, job: _PeerFetch | tuple[str, str]) -> None:
        if isinstance(job, tuple):
            endpoint, offer = job
            self._peer(endpoint).send(_ENCODE(_Header("done", offer)))
            return
        self._fetches[job.offer] = job
        header = _Header("fetch", job.offer, job.first, len(job.blocks))
        self._peer(job.endpoint).send(_ENCODE(header))

    def _peer(self, endpoint: str) -> zmq.Socket[bytes]:
        if endpoint not in self._peers:
            socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            socket.connect(endpoint)
            self._peers[endpoint] = socket
        return self._peers[endpoint]

    def _serve(self, client: bytes, *frames: bytes) -> None:
        """Another engine wants KV, or has it."""
        try:
            header = _DECODE(frames[0])
        except (msgspec.DecodeError, IndexError):
            logger.warning("a message at %s is none that an engine sends", self.endpoint)
            return
        offer = self._offers.get(header.offer)
        if header.kind == "done":
            with self._lock:
                offer = self._offers.pop(header.offer, None)
            if offer is not None:
                self._done.put(offer.request)
            return
        end = header.first + header.count
        if offer is None or not 0 <= header.first <= end <= len(offer.blocks):
            why = "there is no such offer, or its lease has ended" if offer is None else "the offer has fewer blocks"
            self._serving.send_multipart([client, _ENCODE(_Header("refused", header.offer, why=why))])
            return
        try:
            kv = self._gather(offer.blocks[header.first : end]).contiguous()
        except RuntimeError as error:
            refused = _Header("refused", header.offer, why=f"it could not be read: {error}")
            self._serving.send_multipart([client, _ENCODE(refused)])
            return
        if header.offer not in self._offers:  # the lease ended while they were read: others may have written to them
            self._serving.send_multipart([client, _ENCODE(_Header("refused", header.offer, why="its lease has ended"))])
            return
        reply = _Header("kv", header.offer, header.first, header.count, list(kv.shape), str(kv.dtype))
        self._serving.send_multipart([client, _ENCODE(reply), kv.view(torch.uint8).numpy().tobytes()])

    def _receive(self, frames: list[bytes]) -> None:
        """Take another engine's answer to a fetch."""
        header = _DECODE(frames[0])
        fetch = self._fetches.get(header.offer)
        if fetch is None:
            return  # it was given up
        if header.kind != "kv":
            self._fail(fetch, f"it was refused: {header.why}")
            return
        shape, dtype = list(self._form[0]), self._form[1]
        shape[2] = len(fetch.blocks)
        if (header.shape, header.dtype) != (shape, dtype):
            self._fail(
                fetch,
                f"it has the form {header.shape} {header.dtype}, and here it is {shape} {dtype}: both engines"
                " need the same model, dtype and block size",
            )
            return
        kv = torch.frombuffer(bytearray(frames[1]), dtype=getattr(torch, dtype.removeprefix("torch."))).view(shape)
        try:
            self._scatter(fetch.blocks, kv)
        except RuntimeError as error:  # what torch raises, out of memory for one: it is computed instead
            self._fail(fetch, f"it could not be written: {error}")
            return
        del self._fetches[header.offer]
        self._peer(fetch.endpoint).send(_ENCODE(_Header("done", fetch.offer)))
        self._end(fetch, True)

    def _fail(self, fetch: _PeerFetch, why: str) -> None:
        del self._fetches[fetch.offer]
        logger.warning("KV of %d blocks could not be fetched from %s: %s", len(fetch.blocks), fetch.endpoint, why)
        self._end(fetch, False)

    def _end(self, fetch: _PeerFetch, delivered: bool) -> None:
        self._fetched.put((fetch.request, delivered))
        self.log.fetch_ended(fetch.request)
        self._wake()
