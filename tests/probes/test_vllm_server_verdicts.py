"""Verdicts on a vLLM that serves: its front end, its executor's processes and its data-parallel ranks."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest

from kvscope.lab.vllm_python import announce_plugins, needs_vllm
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.ledger.balance import balance_of
from kvscope.monitor.sources.live_stream import LiveStream
from tests.probes.test_vllm_incidents import TRIES, Observed, observed
from tests.probes.test_vllm_live import PATIENCE_S, Server

pytestmark = [needs_vllm, pytest.mark.slow]

FRONT_END, STALLED, DIVERGED = "stuck.front-end", "stuck.engine-stalled", "stuck.rank-diverged"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("vllm")
    announce_plugins(directory, "losing-front-end", "1.0", {"losing": "tests.probes.losing_front_end:register"})
    server = Server(directory)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def engine_processes(server: Server, name: str) -> list[psutil.Process]:
    """The server's processes with that in their name, in the order in which they were started."""
    found = [p for p in psutil.Process(server.process.pid).children(recursive=True) if name in p.name()]
    return sorted(found, key=lambda process: process.pid)


def test_requests_of_the_front_end_are_joined_and_a_healthy_one_is_no_finding(server: Server) -> None:
    asyncio.run(healthy_front_end(server))


async def healthy_front_end(server: Server) -> None:
    async with observed(server) as seen:
        for number in range(40):
            seen.come(f"healthy-{number}", 40, 20)
        gone = seen.ledger.state.totals.client_gone
        came = 0

        def has_left() -> bool:
            """A client leaves while its request runs. If that is seen too late, it has its answer: another comes."""
            nonlocal came
            name = f"cmpl-leaves-{came}-0"
            client = seen.clients.get(name)
            if client is None or client.done():
                came += 1
                seen.come(f"leaves-{came}", 100, 900)
            elif seen.phases.get(name) == "running":
                seen.leave(name)
            return seen.ledger.state.totals.client_gone > gone

        await seen.until(has_left)
        await seen.until(lambda: not seen.phases and all(client.done() for client in seen.clients.values()))
        joined = {record.id for record in seen.ledger.ended if 0 < record.received_ns <= record.arrived_ns}
        assert joined & {f"cmpl-healthy-{number}-0" for number in range(40)}
        assert not [record for record in seen.ledger.state.requests.values() if not record.is_finished]
        assert not [finding for finding in seen.watch.findings() if finding.code == FRONT_END]
        assert not seen.ledger.anomalies


def test_a_request_that_never_reaches_the_scheduler_is_found_until_its_client_goes(server: Server) -> None:
    asyncio.run(lost_on_the_way(server))


async def lost_on_the_way(server: Server) -> None:
    async with observed(server) as seen:
        seen.come("vanish", 40, 20)
        served = 0

        def turn() -> list[FindingReport]:
            nonlocal served
            if all(client.done() for name, client in seen.clients.items() if "vanish" not in name):
                served += 1
                seen.come(f"served-{served}", 40, 20)
            return seen.firing(FRONT_END)

        await seen.until(turn)
        (finding,) = seen.firing(FRONT_END)
        assert (finding.verdict, finding.culprits.requests) == ("likely", ["cmpl-vanish-0"])
        seen.leave("cmpl-vanish-0")
        await seen.until(lambda: turn() == [])
        assert "cmpl-vanish-0" not in {record.id for record in seen.ledger.state.requests.values()}


def test_a_worker_that_stops_is_a_stall_in_the_executor(server: Server) -> None:
    asyncio.run(worker_stops(server))


async def worker_stops(server: Server) -> None:
    (worker,) = engine_processes(server, "Worker")
    async with observed(server) as seen:
        asked = 0

        def keep_busy() -> None:
            """Three requests at any time: what this process reads may be seconds old where the cores are shared."""
            nonlocal asked
            while sum(not client.done() for client in seen.clients.values()) < 3:
                asked += 1
                seen.come(f"stands-{asked}", 100, 900)

        def runs() -> bool:
            keep_busy()
            return "running" in seen.phases.values() and seen.ledger.state.last_step > 150

        await seen.until(runs)
        worker.send_signal(signal.SIGSTOP)
        try:
            evidence: dict[str, object] = {}

            def stands() -> bool:
                nonlocal evidence
                keep_busy()
                for finding in seen.firing(STALLED):
                    evidence = {each.name: each.value for each in reversed(finding.evidence)}
                return "stalled_layer" in evidence

            await seen.until(stands)
            assert evidence["stalled_layer"] == "EXECUTOR"
            assert "(" in str(evidence["stack_frame"])
            assert str(evidence["worker_process_state"]).endswith(": T")
        finally:
            worker.send_signal(signal.SIGCONT)
        await seen.until(lambda: not seen.firing(STALLED) and not seen.phases)


# ---------------------------------------------------------------- data-parallel ranks


def test_the_rank_that_stops_is_named_while_the_other_goes_on(tmp_path: Path) -> None:
    server = Server(tmp_path, "--data-parallel-size", "2", "--api-server-count", "1")
    try:
        server.wait(3 * PATIENCE_S)
        asyncio.run(one_rank_stops(server))
    finally:
        server.stop()


def test_ranks_under_one_engine_id_both_appear_on_a_server(tmp_path: Path) -> None:
    server = Server(tmp_path, "--data-parallel-size", "2", "--api-server-count", "1", engine_id="prod")
    try:
        server.wait(3 * PATIENCE_S)
        asyncio.run(ranks_under_one_name(server))
    finally:
        server.stop()


async def ranks_under_one_name(server: Server) -> None:
    seen = TwoRanks(server)
    came = 0

    def both_have_answered() -> bool:
        nonlocal came
        while sum(not client.done() for client in seen.clients.values()) < 6:
            came += 1
            seen.come(f"r-{came}", 40, 300)
        engines = seen.watch.fleet.engines
        return engines.keys() == {"prod/0", "prod/1"} and all(ledger.ended for ledger in engines.values())

    try:
        await seen.until(both_have_answered)
        ledgers = seen.watch.fleet.engines.values()
        await seen.until(lambda: sum(len(ledger.ended) for ledger in ledgers) == came)
        first, second = ({record.id for record in ledger.ended} for ledger in ledgers)
        assert first | second == seen.clients.keys()
        assert all(
            balance_of(ledger.state).holds and not ledger.losses and not ledger.anomalies
            for ledger in seen.watch.fleet.engines.values()
        )
        assert not [finding for finding in seen.watch.findings("firing") if finding.severity != "info"]
    finally:
        with contextlib.suppress(Exception):
            seen.other.close()
        await seen.close()


class TwoRanks(Observed):
    """Both ranks of the server under one Pipeline."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        head, _, port = server.events.rpartition(":")
        self.other = LiveStream(f"{head}:{int(port) + 2}")

    async def _ask(self, name: str, prompt_tokens: int, max_tokens: int) -> None:
        with contextlib.suppress(httpx2.TransportError):  # an idle connection may end as it is used again
            await super()._ask(name, prompt_tokens, max_tokens)

    def look(self) -> None:
        super().look()
        self.watch.feed([received.frame for received in self.other.receive(0)])


async def one_rank_stops(server: Server) -> None:
    seen = TwoRanks(server)
    names = [f"{server.engine.removesuffix('/0')}/{rank}" for rank in (0, 1)]
    came = 0

    def load(most: int = 6) -> None:
        nonlocal came
        while sum(not client.done() for client in seen.clients.values()) < most:
            came += 1
            seen.come(f"r-{came}", 40, 900)

    def runs(name: str) -> bool:
        ledger = seen.watch.fleet.engines.get(name)
        return ledger is not None and any(request.is_running for request in ledger.state.requests.values())

    def both_run() -> bool:
        load()
        return all(map(runs, names))

    try:
        await seen.until(both_run)
        assert sorted(seen.watch.fleet.engines) == names
        cores = engine_processes(server, "EngineCore")
        (stopped,) = [core for core in cores if core.pid == seen.watch.fleet.engines[names[1]].description.pid]
        for _ in range(TRIES):  # until it is stopped while it runs something
            await seen.until(both_run)
            stopped.send_signal(signal.SIGSTOP)
            for _ in range(50):
                seen.look()
                await asyncio.sleep(0.02)
            if runs(names[1]):
                break
            stopped.send_signal(signal.SIGCONT)
        try:

            def found() -> list[FindingReport]:
                load(12)  # more than the rank that is stopped may hold
                return seen.firing(DIVERGED)

            await seen.until(found)
            (finding,) = seen.firing(DIVERGED)
            assert finding.engine == names[1]
            assert f"rank {names[0].rpartition('/')[2]}" in finding.explanation.lower()
        finally:
            stopped.send_signal(signal.SIGCONT)
    finally:
        with contextlib.suppress(Exception):
            seen.other.close()
        await seen.close()
