"""Hooks in vLLM's front end: which requests it has received, and which clients have gone.

vLLM loads the plug-in in each process. In an API server's, each request passes the OutputProcessor before it is sent
to the engine's process, and leaves it when it ends or its client goes. Reports go to a socket that never waits: what
does not fit in its queue is dropped. Where the front end balances data-parallel ranks, the rank is known only when it
chose one, so RECEIVED is reported there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import zmq

from .front_end_inbox import FrontEndKind, FrontEndMessage

logger = logging.getLogger("vllm.kvscope")

QUEUED_REPORTS: Final = 1_000
MAX_TRACKED: Final = 65_536


class FrontEndReporter:
    """Reports of this process. endpoint_of: where the engine of a rank takes them. own_rank: of the engine in this
    process, or None.
    """

    def __init__(self, endpoint_of: Callable[[int], str], own_rank: Callable[[], int | None]) -> None:
        self._endpoint_of = endpoint_of
        self._own_rank = own_rank
        self._ranks: list[int] = []
        """Ranks of the engines that this front end sends requests to."""
        self._rank_of: dict[str, int] = {}
        """Ranks of requests that were reported and have not ended."""
        self._sockets: dict[int, zmq.Socket[bytes] | None] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._encode = msgspec.msgpack.Encoder().encode

    def connected(self, client: Any) -> None:
        """Note that the client of these engines was made."""
        self._ranks = [int.from_bytes(identity, "little") for identity in client.core_engines]

    def received(self, request: Any) -> None:
        """Report a request that is about to be sent."""
        if len(self._ranks) > 1:
            return  # `routed` follows
        own = self._own_rank()
        self._report_received(request, own if own is not None else self._ranks[0] if self._ranks else 0)

    def routed(self, engine: bytes, request: Any) -> None:
        """Report the rank that was chosen for a request."""
        self._report_received(request, int.from_bytes(engine, "little"))

    def gone(self, request_ids: Iterable[str]) -> None:
        """Report that the clients of these requests have gone."""
        for request_id in request_ids:
            self._report_end(FrontEndKind.CLIENT_GONE, request_id)

    def ended(self, request_id: str) -> None:
        """Report that a request has ended in the front end."""
        self._report_end(FrontEndKind.ENDED, request_id)

    def close(self) -> None:
        """Release the sockets. Unsent reports are dropped."""
        for socket in self._sockets.values():
            if socket is not None:
                socket.close(linger=0)
        self._sockets.clear()
        if self._context is not None:
            self._context.destroy(linger=0)

    def _report_received(self, request: Any, rank: int) -> None:
        request_id = request.request_id
        if request_id not in self._rank_of and len(self._rank_of) < MAX_TRACKED:
            self._rank_of[request_id] = rank
            self._send(rank, FrontEndKind.RECEIVED, request_id, len(request.prompt_token_ids or ()))

    def _report_end(self, kind: FrontEndKind, request_id: str) -> None:
        rank = self._rank_of.pop(request_id, None)
        if rank is not None:
            self._send(rank, kind, request_id)

    def _send(self, rank: int, kind: FrontEndKind, request_id: str, prompt_tokens: int = 0) -> None:
        if rank not in self._sockets:
            self._sockets[rank] = self._connect(self._endpoint_of(rank))
        socket = self._sockets[rank]
        if socket is not None:
            message = FrontEndMessage(kind, request_id, time.monotonic_ns(), prompt_tokens)
            with contextlib.suppress(zmq.Again):  # the engine's process does not read, or is gone
                socket.send(self._encode(message), zmq.NOBLOCK)

    def _connect(self, endpoint: str) -> zmq.Socket[bytes] | None:
        if not endpoint:
            return None
        self._context = self._context or zmq.Context()
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, QUEUED_REPORTS)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        return socket


def watch_front_end(reporter: FrontEndReporter) -> None:
    """Install the hooks in this process's front end, whenever there will be one.

    A release without these methods is left alone: without the end of each request, one that the engine refused would
    look lost.
    """
    from vllm.v1.engine.core_client import DPLBAsyncMPClient, MPClient
    from vllm.v1.engine.output_processor import OutputProcessor

    methods = ("add_request", "abort_requests", "_finish_request")
    if all(hasattr(OutputProcessor, name) for name in methods) and not hasattr(OutputProcessor, "kvscope"):
        OutputProcessor.kvscope = True
        _wrap(OutputProcessor, "add_request", before=lambda _self, request, *_a, **_k: reporter.received(request))
        _wrap(OutputProcessor, "abort_requests", after=lambda ids, *_a, **_k: reporter.gone(ids or ()))
        _wrap(
            OutputProcessor,
            "_finish_request",
            after=lambda _none, _self, state, *_a, **_k: reporter.ended(state.request_id),
        )
        _wrap(MPClient, "__init__", after=lambda _none, client, *_a, **_k: reporter.connected(client))
        _wrap(
            DPLBAsyncMPClient,
            "get_core_engine_for_request",
            after=lambda engine, _self, request, *_a, **_k: reporter.routed(engine, request),
        )


def _wrap(
    kind: type[Any],
    name: str,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    """Call `before` with the arguments, and `after` with the result and them. An error in either turns it off."""
    method = vars(kind)[name]
    calls = {"before": before, "after": after}

    def call(when: str, *args: Any, **kwargs: Any) -> None:
        hook = calls[when]
        if hook is not None:
            try:
                hook(*args, **kwargs)
            except Exception:
                calls[when] = None
                logger.exception("kvscope: the hook on %s.%s is off after an error in it", kind.__name__, name)

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call("before", *args, **kwargs)
        result = method(*args, **kwargs)
        call("after", result, *args, **kwargs)
        return result

    setattr(kind, name, wrapper)
