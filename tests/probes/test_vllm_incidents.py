"""A vLLM that serves, and what its clients or its own process do to it: what the monitor says, by its probe."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

import anyio
import httpx2
import psutil
import pytest

from kvscope.lab.vllm_python import MODEL, needs_vllm
from kvscope.monitor.contract.kinds import Kind, Status
from kvscope.monitor.contract.wire import Batch, Frame
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.detectors.registry import THRESHOLDS
from kvscope.monitor.ledger.balance import balance_of
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.live_stream import LiveStream
from tests.probes.model_shapes import SLOWER
from tests.probes.test_vllm_live import PATIENCE_S, Server

pytestmark = [needs_vllm, pytest.mark.slow]

PHASES = {
    Kind.ARRIVED: "waiting",
    Kind.ADMITTED: "prefill",
    Kind.FIRST_TOKEN: "running",
    Kind.PREEMPTED: "preempted",
}
CLIENTS = 12
INSTANT_COPIES = Settings({"leak.finished-held.unseen_times": 0})
"""The connectors of these incidents would send at once."""
LOCKSTEP = "collapse.lockstep"
STALLED = "stuck.engine-stalled"
TRIES = 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    overrides = ["--hf-overrides", json.dumps(SLOWER), "--max-num-batched-tokens", "512"]
    server = Server(tmp_path_factory.mktemp("vllm"), *overrides)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


class Observed:
    """The server under a Pipeline, and clients of it that may go away."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.stream = LiveStream(server.events)
        self.watch = Pipeline(INSTANT_COPIES)
        self.clients: dict[str, asyncio.Task[None]] = {}
        """By the id that the engine knows them by."""
        self.phases: dict[str, str] = {}
        """In which each request of theirs is that has not ended."""
        self.left: Counter[str] = Counter()
        """How many were aborted, by the phase that they were in."""
        self._names: dict[int, str] = {}
        self._scopes: dict[asyncio.Task[None], anyio.CancelScope] = {}
        self.http = httpx2.AsyncClient(timeout=PATIENCE_S, limits=httpx2.Limits(max_connections=None))

    @property
    def ledger(self) -> EngineLedger:
        return self.watch.fleet.engines[self.server.engine]

    async def until(self, done: Callable[[], object]) -> None:
        """Feed the Pipeline until that is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not (self.server.engine in self.watch.fleet.engines and self.ledger.ready and done()):
            assert time.monotonic() < deadline, f"it did not come to that: {self._seen()}"
            for client in self.clients.values():
                if client.done():
                    client.result()
            self.look()
            await asyncio.sleep(0.02)

    def _seen(self) -> str:
        """What there is to say of the server, its clients and the monitor."""
        processes = [(each.name(), each.status()) for each in psutil.Process(self.server.process.pid).children(True)]
        answered = {name: client.done() for name, client in self.clients.items()}
        log = self.server.log.read_text()
        _, begins, first_error = log.partition("Traceback")
        told = f"{begins}{first_error[:4000]}\n…\n{log[-2000:]}"
        return f"{processes}, answered {answered}, left {self.left}, {self.watch.findings()}, {told}"

    def look(self) -> None:
        """Take what has come."""
        frames = [received.frame for received in self.stream.receive(0)]
        self.watch.feed(frames)
        for frame in frames:
            self._note(frame)

    def _note(self, frame: Frame) -> None:
        if not isinstance(frame, Batch):
            return
        self._names |= frame.texts
        for run in frame.events():
            name = self._names.get(run.request, "")
            if run.kind in PHASES:
                self.phases[name] = PHASES[Kind(run.kind)]
            elif run.kind == Kind.FINISHED:
                phase = self.phases.pop(name, "")
                self.left[phase] += run.args[0] == Status.FINISHED_ABORTED

    def come(self, name: str, prompt_tokens: int, max_tokens: int) -> None:
        """A client asks."""
        scope = anyio.CancelScope()
        client = asyncio.create_task(self._until_left(scope, name, prompt_tokens, max_tokens))
        self.clients[f"cmpl-{name}-0"] = client
        self._scopes[client] = scope

    async def _until_left(self, scope: anyio.CancelScope, name: str, prompt_tokens: int, max_tokens: int) -> None:
        """Task.cancel() may hit the HTTP client as it closes idle connections, which stay open then: a scope waits."""
        with scope:
            await self._ask(name, prompt_tokens, max_tokens)

    async def _ask(self, name: str, prompt_tokens: int, max_tokens: int) -> None:
        rng = random.Random(name)
        body = {
            "model": "tiny",
            "prompt": [rng.randrange(1, MODEL["vocab_size"]) for _ in range(prompt_tokens)],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        url, headers = f"{self.server.url}/v1/completions", {"X-Request-Id": name}
        async with self.http.stream("POST", url, headers=headers, json=body) as answer:
            assert answer.status_code == httpx2.codes.OK, await answer.aread()
            async for _ in answer.aiter_lines():
                pass

    def leave(self, name: str) -> None:
        """That client closes its connection."""
        self._scopes[self.clients.pop(name)].cancel()

    async def close(self) -> None:
        for scope in self._scopes.values():
            scope.cancel()
        await asyncio.gather(*self._scopes, return_exceptions=True)
        await self.http.aclose()
        self.stream.close()

    def firing(self, code: str) -> list[FindingReport]:
        return [finding for finding in self.watch.findings("firing") if finding.code == code]


@contextlib.asynccontextmanager
async def observed(server: Server) -> AsyncIterator[Observed]:
    """Idle at the beginning."""
    seen = Observed(server)
    try:
        await seen.until(lambda: not any(not r.is_finished for r in seen.ledger.state.requests.values()))
        yield seen
    finally:
        await seen.close()


def test_clients_that_go_away_in_any_phase_are_counted_and_leave_nothing_behind(server: Server) -> None:
    asyncio.run(clients_leave(server))


async def clients_leave(server: Server) -> None:
    async with observed(server) as seen:
        rng = random.Random(0)
        aborted = seen.ledger.state.totals.finished.get(Status.FINISHED_ABORTED, 0)
        leaving: dict[str, str] = {}
        came = 0

        def turn() -> bool:
            """Whether somebody has left in each phase; if not, have one leave who is in a phase that lacks one."""
            nonlocal came
            for name in [name for name in leaving if name not in seen.phases]:
                del leaving[name]
            while len(seen.clients) - sum(client.done() for client in seen.clients.values()) < CLIENTS:
                came += 1
                seen.come(f"r-{came}", rng.randrange(500, 600), rng.randrange(350, 420))
            for name, phase in seen.phases.items():
                if seen.left[phase] or phase in leaving.values() or name not in seen.clients:
                    continue
                leaving[name] = phase
                seen.leave(name)
            return all(seen.left[phase] for phase in PHASES.values())

        await seen.until(turn)
        for name in list(seen.clients):
            seen.leave(name)
        await seen.until(lambda: not seen.phases)
        audited = seen.ledger.state.audit_cycles

        def is_audited() -> bool:
            """An audit advances with the steps of requests."""
            nonlocal came
            if all(client.done() for client in seen.clients.values()):
                came += 1
                seen.come(f"looks-after-{came}", 100, 300)
            return seen.ledger.state.audit_cycles > audited + 1

        await seen.until(is_audited)
        await seen.until(lambda: not seen.phases and all(client.done() for client in seen.clients.values()))
        state = seen.ledger.state
        assert seen.left.total() == state.totals.finished[Status.FINISHED_ABORTED] - aborted
        assert not seen.ledger.anomalies
        assert balance_of(state).holds
        assert (state.used, balance_of(state).unaccounted) == (0, 0)
        assert not state.unexplained_references()
        assert not [f for f in seen.watch.findings() if f.code.startswith(("leak.", "corrupt."))]


def test_alike_requests_that_run_in_step_are_a_collapse(server: Server) -> None:
    asyncio.run(waves(server))


async def waves(server: Server) -> None:
    """Eight at a time, the next eight when all are answered: 92 % of the pool, and then nothing."""
    async with observed(server) as seen:
        came = 0

        def turn() -> list[FindingReport]:
            nonlocal came
            if all(client.done() for client in seen.clients.values()):
                for _ in range(8):
                    came += 1
                    seen.come(f"alike-{came}", 600, 120)
            return seen.firing(LOCKSTEP)

        await seen.until(turn)
        (finding,) = seen.firing(LOCKSTEP)
        assert (finding.verdict, finding.missing) == ("confirmed", "")
        assert set(finding.culprits.requests) < {f"cmpl-alike-{number}-0" for number in range(1, came + 1)}
        assert len(finding.culprits.requests) >= THRESHOLDS[f"{LOCKSTEP}.min_requests"].value
        assert [f.code for f in seen.watch.findings() if f.severity != "info"] == [LOCKSTEP]
        # Requests whose clients went away now would reach a busy engine while the next test looks at it.
        await seen.until(lambda: all(client.done() for client in seen.clients.values()))


def test_an_engine_that_is_stopped_is_stalled_though_the_server_is_healthy(server: Server) -> None:
    asyncio.run(stopped(server))


async def stop_in_the_middle(engine: psutil.Process, seen: Observed) -> str:
    """Stop the engine while it has a request, whose name it is. On a busy machine one may have ended before its
    beginning was heard: then another is tried.
    """
    for attempt in range(TRIES):
        name = f"cmpl-stands-still-{attempt}-0"
        seen.come(f"stands-still-{attempt}", 100, 800)
        client = seen.clients[name]
        await seen.until(lambda name=name, client=client: name in seen.phases or client.done())
        engine.send_signal(signal.SIGSTOP)
        for _ in range(50):  # what was said before may still be on its way
            seen.look()
            await asyncio.sleep(0.02)
        if seen.phases:
            return name
        engine.send_signal(signal.SIGCONT)
    raise AssertionError(f"each of {TRIES} requests had ended before its beginning was heard")


async def stopped(server: Server) -> None:
    (engine,) = [p for p in psutil.Process(server.process.pid).children(recursive=True) if "EngineCore" in p.name()]
    async with observed(server) as seen:
        name = await stop_in_the_middle(engine, seen)
        try:
            await seen.until(lambda: seen.firing(STALLED))
            (finding,) = seen.firing(STALLED)
            assert finding.severity == "critical"
            assert finding.culprits.requests == [name]
            assert (await seen.http.get(f"{server.url}/health")).status_code == httpx2.codes.OK
        finally:
            engine.send_signal(signal.SIGCONT)
        await seen.until(lambda: not seen.firing(STALLED) and not seen.phases)
        assert not seen.left.total()
        assert balance_of(seen.ledger.state).holds
