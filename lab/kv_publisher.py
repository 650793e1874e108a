"""A vLLM's publisher of KV events, over real ZeroMQ: both wire formats, both formats of the replay, a ring of the past.

It speaks what a real vLLM published (tests/data/*.kv.jsonl.gz), with made-up token ids, which nobody may keep.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import zmq

from kvscope.monitor.sources.targets import SOURCES_PATH

DATA: Final = Path(__file__).parent.parent / "tests" / "data"
TOKEN = 987_654_321
"""Stands for each token id; nothing that was received may have it."""
STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
REMOVED = ("block_hashes", "medium", "group_idx")


class Recorded(NamedTuple):
    """A batch as the engine published it: its events as maps."""

    sequence: int
    ts: float
    events: list[dict[str, Any]]


def recorded(name: str) -> list[Recorded]:
    """The batches of a recording of vLLM 0.32."""
    batches: dict[int, Recorded] = {}
    with gzip.open(DATA / f"{name}.kv.jsonl.gz", "rt") as file:
        for line in file:
            row = json.loads(line)
            batch = batches.setdefault(row["seq"], Recorded(row["seq"], row["ts"], []))
            event = row["event"]
            if event["type"] == "BlockStored":
                event["token_ids"] = [TOKEN] * (event["block_size"] * len(event["block_hashes"]))
            batch.events.append(event)
    return list(batches.values())


def encoded(batch: Recorded, wire: str, rank: int = 0) -> bytes:
    """Its payload, as `arrays` (vLLM up to 0.23) or `maps` (since)."""
    if wire == "maps":
        return msgspec.msgpack.encode([batch.ts, batch.events, rank])
    events: list[list[Any]] = []
    for event in batch.events:
        fields = {"BlockStored": STORED, "BlockRemoved": REMOVED}.get(event["type"], ())
        events.append([event["type"], *(event.get(field) for field in fields)])
    return msgspec.msgpack.encode([batch.ts, events, rank])


class KvPublisher:
    """Publishes at `events`, and answers at `replay` if there is one. `keep` is how many batches it remembers."""

    def __init__(
        self, events: str, replay: str = "", *, topic: bytes = b"kv", names_topic: bool = True, keep: int = 10_000
    ) -> None:
        self._names_topic = names_topic
        self._topic = topic
        self._keep = keep
        self._ring: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(events)
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._router = self._context.socket(zmq.ROUTER)
        self._thread: threading.Thread | None = None
        self.asked: list[int] = []
        """From which sequences on a replay was asked for."""
        if replay:
            self._router.bind(replay)
            self._thread = threading.Thread(target=self._answer)
            self._thread.start()

    def publish(self, sequence: int, payload: bytes, *, dropped: bool = False) -> None:
        """Send one; `dropped`: it is remembered, and lost on its way to who listens."""
        with self._lock:
            self._ring.append((sequence, payload))
            del self._ring[: -self._keep]
        if not dropped:
            self._pub.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])

    def send(self, *parts: bytes) -> None:
        """Publish whatever this is."""
        self._pub.send_multipart(list(parts))

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._context.destroy(linger=0)

    def _answer(self) -> None:
        while not self._stop.is_set():
            if not self._router.poll(20):
                continue
            parts = self._router.recv_multipart()
            if len(parts) != 3:
                continue  # as vLLM does, but for its warning
            start = int.from_bytes(parts[2], "big")
            self.asked.append(start)
            topic = [self._topic] if self._names_topic else []
            with self._lock:
                ring = [(sequence, payload) for sequence, payload in self._ring if sequence >= start]
            for sequence, payload in ring:
                self._router.send_multipart([parts[0], b"", *topic, sequence.to_bytes(8, "big"), payload])
            end = (-1).to_bytes(8, "big", signed=True)
            self._router.send_multipart([parts[0], b"", *([b""] if self._names_topic else []), end, b""])


@contextlib.contextmanager
def publishing(
    directory: Path, batches: Iterable[Recorded] = (), *, wire: str = "maps", replay: bool = True, **options: Any
) -> Iterator[KvPublisher]:
    """A publisher at ipc://directory/kv that has published these before anybody listened."""
    events = f"ipc://{directory}/kv"
    publisher = KvPublisher(events, f"{events}-replay" if replay else "", **options)
    try:
        for batch in batches:
            publisher.publish(batch.sequence, encoded(batch, wire))
        yield publisher
    finally:
        publisher.close()


@contextlib.contextmanager
def telling(body: bytes, status: int = 200) -> Iterator[str]:
    """The address of a server that says this of its KV events."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{SOURCES_PATH}"
        finally:
            server.shutdown()
            thread.join()
