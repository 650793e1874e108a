"""Engines that move KV, a router between two of them, and what the monitor says of them by each way that it has."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx2

from kvscope.lab.vllm_python import MODEL, PAIRS, announce_plugins, environment, free_ports
from kvscope.monitor.contract.samples import Record
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.live_stream import LiveStream
from kvscope.monitor.sources.metrics_page import MetricsPage
from kvscope.monitor.terminal.report import examine
from tests.probes.test_vllm_live import PATIENCE_S, Server

WAYS: Final = ("stream", "page", "log")
SCRAPE_S: Final = 2.0
ASKS_FOR_REMOTE_DECODE: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Engine(Server):
    """A server with a KV connector, and what is read of it while it runs."""

    def __init__(self, directory: Path, connector: dict[str, Any], *arguments: str, **more: str) -> None:
        directory.mkdir()
        announce_plugins(directory, "transfer-shims", "1.0", {"shims": "tests.probes.transfer_shims:register"})
        arguments = ("--kv-transfer-config", json.dumps(connector), *arguments)
        # Of one name for both sides of a pair: a connector refuses what is not the same model.
        super().__init__(directory, *arguments, python=PAIRS, model=directory.parent / "model", **more)
        self.page_engine = f"tiny@{self.url.removeprefix('http://')}/0"

    def ask(self, name: str, prompt: Sequence[int], max_tokens: int, **transfer: Any) -> dict[str, Any]:
        """Return the answer to a completion. `transfer`: its kv_transfer_params."""
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        if transfer:
            body["kv_transfer_params"] = transfer
        answer = httpx2.post(
            f"{self.url}/v1/completions", headers={"X-Request-Id": name}, timeout=PATIENCE_S, json=body
        )
        assert answer.status_code == httpx2.codes.OK, answer.text
        return dict(answer.json())

    def kill(self) -> None:
        """As a machine does that loses power: all its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def prompt_of(name: str, tokens: int) -> list[int]:
    """Return a prompt that no other name has."""
    rng = random.Random(name)
    return [rng.randrange(1, MODEL["vocab_size"]) for _ in range(tokens)]


# ---------------------------------------------------------------- connectors


def nixl(directory: Path, role: str, **extra: Any) -> Engine:
    """One side of a pair over loopback."""
    connector = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"backends": ["UCX"], "num_threads": 1} | extra,
    }
    return Engine(
        directory / role,
        connector,
        VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_ports()),
        UCX_TLS="tcp,self,sm",
        UCX_NET_DEVICES="lo",
    )


def mooncake(directory: Path, role: str, bootstrap: int) -> Engine:
    connector = {
        "kv_connector": "MooncakeConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 2},
    }
    return Engine(
        directory / role,
        connector,
        VLLM_HOST_IP="127.0.0.1",
        VLLM_MOONCAKE_BOOTSTRAP_PORT=str(bootstrap),
        VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT="30",
    )


def offloading(directory: Path, chunks: int, *arguments: str, seconds_a_block: float = 0.0) -> Engine:
    """An engine with a host tier of so many blocks."""
    block_bytes = 2 * 32 * MODEL["num_key_value_heads"] * MODEL["head_dim"] * MODEL["num_hidden_layers"] * 4
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CopyingTierSpec",
            "spec_module_path": "tests.probes.copying_tier",
            "cpu_bytes_to_use": chunks * block_bytes,
            "seconds_a_block": seconds_a_block,
        },
    }
    return Engine(directory / "offloading", connector, *arguments)


class TierServer:
    """LMCache's server, a process beside the engine that keeps KV in host memory."""

    def __init__(self, directory: Path, gigabytes: float = 0.05) -> None:
        self.port, http = free_ports(), free_ports()
        self._health = f"http://127.0.0.1:{http}/metrics"
        self.log = directory / "tier.log"
        arguments = {
            "host": "127.0.0.1",
            "port": self.port,
            "http-host": "127.0.0.1",
            "http-port": http,
            "l1-size-gb": gigabytes,
            "chunk-size": 64,
            "eviction-policy": "LRU",
            "max-workers": 2,
            "supported-transfer-mode": "engine_driven",  # with another the engine waits for ever
        }
        given = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(Path(PAIRS).with_name("lmcache")), "server", *given],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                start_new_session=True,
                env=environment(PYTHONPATH="", LMCACHE_TRACK_USAGE="false"),
            )

    def wait(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(self._health, timeout=5).status_code == httpx2.codes.OK:
                    return
            time.sleep(0.2)
        raise AssertionError(self.log.read_text())

    def signal(self, number: signal.Signals) -> None:
        """Send all its processes a signal: to kill it, to freeze it, or to let it go on."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@contextlib.contextmanager
def tier_server(directory: Path, gigabytes: float = 0.05) -> Iterator[TierServer]:
    """Wait until it serves; kill it at the end."""
    server = TierServer(directory, gigabytes)
    try:
        server.wait()
        yield server
    finally:
        server.signal(signal.SIGKILL)
        server.process.wait()


def lmcache(directory: Path, server: TierServer) -> Engine:
    """An engine that keeps KV in that server. The class of the same name within vLLM needs an accelerator."""
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port},
    }
    return Engine(directory / "lmcache", connector, LMCACHE_TRACK_USAGE="false")


Route = Callable[[str, Sequence[int], int], dict[str, Any]]


def nixl_route(prefill: Engine, decode: Engine, between_s: float = 0.0) -> Route:
    """The prefill computes the prompt, and the decode fetches it from there, `between_s` later."""

    def through(name: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        first = prefill.ask(name, prompt, 1, **ASKS_FOR_REMOTE_DECODE)
        time.sleep(between_s)
        return decode.ask(name, prompt, max_tokens, **first["kv_transfer_params"])

    return through


def mooncake_route(prefill: Engine, decode: Engine, bootstrap: int) -> Route:
    """Both are asked at once: the decode tells the prefill where to send the KV."""
    address = f"http://127.0.0.1:{bootstrap}"
    engine_id = httpx2.get(f"{address}/query", timeout=PATIENCE_S).json()["0"]["engine_id"]

    def through(name: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        transfer = str(uuid4())
        prefill.ask(name, prompt, 1, do_remote_decode=True, do_remote_prefill=False, transfer_id=transfer)
        return decode.ask(
            name,
            prompt,
            max_tokens,
            do_remote_decode=False,
            do_remote_prefill=True,
            remote_engine_id=engine_id,
            remote_bootstrap_addr=address,
            transfer_id=transfer,
        )

    return through


# ---------------------------------------------------------------- what the monitor says


class Watched:
    """Engines, their clients, and a Pipeline over their streams beside one over their pages."""

    def __init__(self, *engines: Engine, settings: Settings | None = None) -> None:
        self.engines = engines
        self.settings = settings or Settings()
        self.by_stream, self.by_page = Pipeline(self.settings), Pipeline(self.settings)
        self.recorded: list[tuple[str, Record]] = []
        self._streams = [LiveStream(engine.events) for engine in engines]
        self._pages = [MetricsPage(f"{engine.url}/metrics", every_s=SCRAPE_S) for engine in engines]
        self._pool = ThreadPoolExecutor(16)
        self.clients: list[Future[dict[str, Any]]] = []

    def come(self, route: Route, name: str, prompt: Sequence[int], max_tokens: int) -> Future[dict[str, Any]]:
        """A client asks."""
        client = self._pool.submit(route, name, prompt, max_tokens)
        self.clients.append(client)
        return client

    def unanswered(self) -> int:
        """How many clients wait for their answer."""
        return sum(not client.done() for client in self.clients)

    def look(self) -> None:
        """Take what has come."""
        for stream in self._streams:
            self._feed("stream", self.by_stream, [received.frame for received in stream.receive(0)])
        for page in self._pages:
            self._feed("page", self.by_page, page.poll(0.0))

    def _feed(self, way: str, pipeline: Pipeline, records: Sequence[Record]) -> None:
        pipeline.feed(records)
        self.recorded += [(way, record) for record in records]

    def until(self, done: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
        """Look until that is so."""
        deadline = time.monotonic() + patience_s
        while not done():
            if time.monotonic() > deadline:
                raise AssertionError(f"it did not come to that: {self.by_stream.findings()} {self.by_page.findings()}")
            self.look()
            time.sleep(0.05)

    def goes_on(self, seconds: float) -> None:
        """Look for so long."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end, seconds + PATIENCE_S)

    def ledger(self, engine: Engine) -> EngineLedger:
        """What the stream tells of an engine."""
        return self.by_stream.fleet.engines[engine.engine]

    def findings(self, way: str, engine: Engine) -> dict[str, FindingReport]:
        """Return what there ever was above information by that way, by code."""
        if way == "log":
            found = examine([str(engine.log)], self.settings).findings
        elif way == "page":
            found = [each for each in self.by_page.findings() if each.engine == engine.page_engine]
        else:
            found = [each for each in self.by_stream.findings() if each.engine == engine.engine]
        return {each.code: each for each in found if each.severity not in ("info", "none")}

    def close(self) -> None:
        """Disconnect. Clients of an engine that is stopped have their errors."""
        for source in (*self._streams, *self._pages):
            source.close()
        self._pool.shutdown()


@contextlib.contextmanager
def watched(*engines: Engine, settings: Settings | None = None) -> Iterator[Watched]:
    """Wait until they serve; stop them at the end."""
    try:
        for engine in engines:
            engine.wait(2 * PATIENCE_S)
        seen = Watched(*engines, settings=settings)
        try:
            seen.until(lambda: all(e.engine in seen.by_stream.fleet.engines for e in engines))
            yield seen
        finally:
            for engine in engines:
                engine.stop()
            seen.close()
    finally:
        for engine in engines:
            engine.stop()
