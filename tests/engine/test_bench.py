"""The load generator against a real engine process: what its clients saw is what the engine did."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count, pairwise
from signal import SIGKILL

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvscope.engine.bench.load_bench import (
    BenchLoad,
    ClientRecord,
    bench_over_http,
    client_arrivals,
    latency_spread,
    summarize_clients,
)
from tests.engine.process import PATIENCE_S, EngineProcess, wait_for


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess("--num-gpu-blocks-override", "513", "--max-model-len", "4096") as engine:
        yield engine


def metric(engine: EngineProcess, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(httpx2.get(f"{engine.url}/metrics").text)
    samples = [s for family in families for s in family.samples if s.name == f"vllm:{name}"]
    (value,) = (s.value for s in samples if labels.items() <= s.labels.items())
    return value


def test_what_clients_saw_is_what_the_engine_did(engine: EngineProcess) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_hits_total")
    before = {name: metric(engine, name) for name in names}
    load = BenchLoad(
        num_prompts=12, request_rate=100, input_len=20, prefix_len=32, output_len=7, max_concurrency=3, seed=1
    )
    seen = asyncio.run(bench_over_http(load, f"{engine.url}/v1/"))
    made = summarize_clients(seen)
    assert made.requests == {"completed": 12, "timed out": 0, "disconnected": 0, "failed": 0}
    assert made.errors == []
    assert all(one.output_tokens == len(one.came) == 7 for one in seen)
    grown = {name: metric(engine, name) - before[name] for name in names}
    assert grown["prompt_tokens_total"] == made.prompt_tokens == 12 * 52
    assert grown["generation_tokens_total"] == made.output_tokens == 12 * 7
    # The first three may have come together; for all after them, the two blocks of the prefix were there.
    assert 9 * 32 <= grown["prefix_cache_hits_total"] <= 11 * 32
    at_once = [sum(other.began <= one.began < other.ended for other in seen) for one in seen]
    assert max(at_once) <= 3
    assert all(one.began <= one.came[0] <= one.came[-1] <= one.ended for one in seen)


@pytest.mark.slow
def test_clients_that_lose_patience_or_leave_are_gone_for_the_engine_too(engine: EngineProcess) -> None:
    def aborted() -> float:
        return metric(engine, "request_success_total", finished_reason="abort")

    before = aborted()
    timed_out = summarize_clients(
        asyncio.run(bench_over_http(BenchLoad(3, output_len=4000, input_len=5, timeout_s=2), engine.url))
    )
    assert timed_out.requests["timed out"] == 3
    assert timed_out.end_to_end_ms is None
    wait_for(lambda: aborted() == before + 3)
    # A seed with which they leave early, so that none can have had its whole answer.
    loads = (BenchLoad(3, output_len=600, input_len=5, disconnect=1.0, seed=seed) for seed in count())
    load = next(load for load in loads if all((one.leaves_after or 0) < 100 for one in client_arrivals(load)))
    seen = asyncio.run(bench_over_http(load, engine.url))
    assert summarize_clients(seen).requests["disconnected"] == 3
    assert [len(one.came) for one in seen] == [one.leaves_after for one in client_arrivals(load)]
    wait_for(lambda: aborted() == before + 6)
    wait_for(lambda: metric(engine, "kv_cache_usage_perc") == 0)


def test_a_request_that_is_refused_fails_and_says_why(engine: EngineProcess) -> None:
    made = bench("--base-url", engine.url, "--num-prompts", "2", "--input-len", "4096", "--output-len", "1")
    assert made.returncode == 1
    assert "2 failed" in made.stdout
    assert "max_model_len is 4096" in made.stdout


@pytest.mark.slow
def test_a_server_that_dies_fails_its_requests() -> None:
    load = BenchLoad(4, input_len=5, output_len=3000)
    made: list[ClientRecord] = []
    with EngineProcess("--max-model-len", "4096") as engine:
        running = threading.Thread(target=lambda: made.extend(asyncio.run(bench_over_http(load, engine.url))))
        running.start()
        # All four have had some by then: they run together.
        wait_for(lambda: metric(engine, "num_requests_running") == 4)
        wait_for(lambda: metric(engine, "generation_tokens_total") > 400)
        engine.stop(SIGKILL)
        running.join(PATIENCE_S)
    assert summarize_clients(made).requests["failed"] == 4
    assert all(0 < len(seen.came) < 3000 and seen.error for seen in made)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [("--offline",), ("--simulate", "60")])
def test_in_this_process_and_as_json(asked: tuple[str, ...]) -> None:
    arguments = ("--num-prompts", "5", "--input-len", "9", "--output-len", "4", "--block-size", "8", "--format", "json")
    made = bench(*asked, *arguments)
    assert (made.returncode, "5/5" in made.stderr) == (0, asked == ("--offline",))
    reported = json.loads(made.stdout)
    assert reported["requests"]["completed"] == 5
    assert (reported["prompt_tokens"], reported["output_tokens"]) == (45, 20)
    for name in ("ttft_ms", "inter_token_ms", "end_to_end_ms"):
        assert 0 <= reported[name]["p50"] <= reported[name]["p90"] <= reported[name]["p99"]
    assert reported["ttft_ms"]["mean"] < reported["end_to_end_ms"]["mean"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--base-url --offline --simulate is required"),
        (("--base-url", "http://127.0.0.1:1"), "no engine answers at http://127.0.0.1:1"),
        (("--base-url", "http://127.0.0.1:1", "--block-size", "8"), "are for --offline"),
        (("--offline", "--journal", "somewhere"), "--journal is for --simulate"),
        (("--simulate", "60", "--kv-connector", "peer"), "needs another engine"),
        (("--offline", "--num-prompts", "0"), "num_prompts is 0"),
        (("--offline", "--request-rate", "0"), "request_rate is 0"),
        (("--offline", "--timeout", "-1"), "timeout_s is -1"),
        (("--offline", "--disconnect", "2"), "disconnect is 2"),
    ],
)
def test_what_cannot_be_asked_is_said_in_a_line(arguments: tuple[str, ...], says: str) -> None:
    made = bench(*arguments)
    assert made.returncode == 2
    assert says in made.stderr
    assert "Traceback" not in made.stderr


def test_arrivals_are_a_poisson_process_and_the_seeds_own() -> None:
    load = BenchLoad(2000, request_rate=50, input_len=3, prefix_len=4, disconnect=0.25, seed=3)
    came = list(client_arrivals(load))
    assert came == list(client_arrivals(load))
    gaps = [after.at_s - before.at_s for before, after in pairwise(came)]
    # Exponential: mean and deviation are both 1/rate. Four standard errors; the draws are the same each time.
    assert abs(statistics.fmean(gaps) - 1 / 50) < 4 / 50 / math.sqrt(len(gaps))
    assert abs(statistics.stdev(gaps) - 1 / 50) < 4 / 50 * math.sqrt(2 / len(gaps))
    assert len({tuple(one.prompt[:4]) for one in came}) == 1
    assert len({tuple(one.prompt[4:]) for one in came}) > 1990
    leaving = sum(one.leaves_after is not None for one in came)
    assert abs(leaving - 500) < 4 * math.sqrt(2000 * 0.25 * 0.75)
    assert all(one.at_s == 0 for one in client_arrivals(BenchLoad(5)))
    assert next(client_arrivals(BenchLoad(1, seed=4))).prompt != next(client_arrivals(BenchLoad(1, seed=5))).prompt


def test_percentiles_are_those_of_the_statistics_module() -> None:
    rng = random.Random(2)
    seconds = [rng.random() for _ in range(37)]
    made = latency_spread(seconds)
    assert made is not None
    cuts = statistics.quantiles([1000 * value for value in seconds], n=100, method="inclusive")
    assert (made.p50, made.p90, made.p99) == pytest.approx((cuts[49], cuts[89], cuts[98]))
    assert made.mean == pytest.approx(1000 * statistics.fmean(seconds))
    assert latency_spread([]) is None
    alone = latency_spread([0.25])
    assert alone is not None
    assert (alone.mean, alone.p50, alone.p99) == (250, 250, 250)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvscope.engine", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
