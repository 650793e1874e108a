"""Verdicts on a vLLM that serves, from its metrics page alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import anyio
import httpx2
import pytest

from kvscope.lab.vllm_python import needs_vllm
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.detectors.registry import parse_settings
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.metrics_page import MetricsPage
from tests.probes.test_vllm_live import PATIENCE_S, Server

# Its load takes both cores for minutes: on a shared machine the front end starves the engine, and no queue grows.
pytestmark = [needs_vllm, pytest.mark.prove]

OVERLOAD = "sizing.overload"
WINDOW_S, SCRAPE_S = 60.0, 2.0
ASKED_EVERY_S = 0.05
PROMPT, OUTPUT = 500, 400


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """128 blocks of 32 tokens: five such requests at once."""
    server = Server(tmp_path_factory.mktemp("vllm"), "--num-gpu-blocks-override", "128", "--no-enable-prefix-caching")
    try:
        server.wait(3 * PATIENCE_S)
        yield server
    finally:
        server.stop()


def test_a_long_queue_before_a_tiny_pool_is_an_overload(server: Server) -> None:
    finding, arrived_per_s, completed_per_s = asyncio.run(overload(server))
    assert finding.verdict == "likely"
    evidence = {each.name: float(each.value) for each in finding.evidence}
    # The test counts over its whole life, the finding over a window: beside the bounds, a quarter for that.
    assert 0.75 * evidence["arrival_rate_low"] <= arrived_per_s <= 1.25 * evidence["arrival_rate_high"]
    assert 0.75 * evidence["completion_rate_low"] <= completed_per_s <= 1.25 * evidence["completion_rate_high"]
    assert evidence["completion_rate_high"] < evidence["arrival_rate_low"]


async def overload(server: Server) -> tuple[FindingReport, float, float]:
    """Ask at a steady rate until it is found; return the rates that the clients saw over the finding's window."""
    watch = Pipeline(parse_settings([f"{OVERLOAD}.window_s={WINDOW_S}"]))
    page = MetricsPage(f"{server.url}/metrics", every_s=SCRAPE_S)
    asked_s: list[float] = []
    answered_s: list[float] = []
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    limits = httpx2.Limits(max_connections=None)
    async with (
        httpx2.AsyncClient(timeout=PATIENCE_S, limits=limits) as client,
        anyio.create_task_group() as clients,
    ):

        async def ask() -> None:
            asked_s.append(loop.time())
            body = {"model": "tiny", "prompt": [5] * PROMPT, "max_tokens": OUTPUT, "ignore_eos": True}
            answer = await client.post(f"{server.url}/v1/completions", json=body)
            assert answer.status_code == httpx2.codes.OK
            answered_s.append(loop.time())

        async def ask_steadily() -> None:
            while True:  # whatever a scrape of the busy server takes
                clients.start_soon(ask)
                await asyncio.sleep(ASKED_EVERY_S)

        try:
            clients.start_soon(ask_steadily)
            while loop.time() - began_s < PATIENCE_S:
                watch.feed(await asyncio.to_thread(page.poll, 0.0))
                firing = [each for each in watch.findings("firing") if each.code == OVERLOAD]
                if firing:
                    now_s = loop.time()
                    span_s = WINDOW_S
                    rates = [sum(at_s > now_s - span_s for at_s in each) / span_s for each in (asked_s, answered_s)]
                    return firing[0], rates[0], rates[1]
                await asyncio.sleep(ASKED_EVERY_S)
        finally:
            clients.cancel_scope.cancel()
            page.close()
    (ledger,) = watch.fleet.engines.values()
    raise AssertionError([(s.at_ns, s.running, s.waiting, s.deferred, s.finished, s.usage) for s in ledger.samples])
