"""What /metrics shows of requests: vLLM's own dashboard finds its series, and they agree with each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.process import PATIENCE_S, EngineProcess, wait_for

HISTOGRAMS: Final = ("e2e_request_latency", "inter_token_latency", "time_to_first_token")
VLLM_DASHBOARD: Final = frozenset(
    [f"{name}_seconds_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")]
    + [f"request_{name}_time_seconds_sum" for name in ("queue", "prefill", "decode")]
    + ["request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_max_num_generation_tokens_sum"]
    + ["request_success_total", "prompt_tokens_total", "generation_tokens_total"]
    + ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
)
"""What the queries of vLLM's own dashboard ask for: examples/observability/prometheus_grafana/grafana.json."""


def samples(engine: EngineProcess) -> dict[str, float]:
    """The sum of each metric of vLLM's names over its labels."""
    page = httpx2.get(f"{engine.url}/metrics").text
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name.removeprefix("vllm:")] += sample.value
    return found


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess("--num-gpu-blocks-override", "65", "--max-model-len", "4096") as engine:
        yield engine


@pytest.mark.usefixtures("real_parts")
def test_vllms_own_dashboard_has_data_and_the_histograms_agree(engine: EngineProcess) -> None:
    before = samples(engine)
    asked = {"prompt": ["one", "two", "three"], "max_tokens": 8, "ignore_eos": True}
    httpx2.post(f"{engine.url}/v1/completions", json=asked, timeout=PATIENCE_S).raise_for_status()
    wait_for(
        lambda: samples(engine)["e2e_request_latency_seconds_count"] >= before["e2e_request_latency_seconds_count"] + 3
    )
    now = samples(engine)
    assert now.keys() >= VLLM_DASHBOARD
    grown = {name: now[name] - before[name] for name in now}
    assert grown["request_generation_tokens_sum"] == grown["request_max_num_generation_tokens_sum"] == 3 * 8
    assert grown["request_prompt_tokens_sum"] == len("one" + "two" + "three") + 3
    assert grown["request_params_max_tokens_sum"] == 3 * 8
    assert grown["time_to_first_token_seconds_count"] == 3
    assert grown["inter_token_latency_seconds_count"] == 3 * 7
    assert grown["iteration_tokens_total_sum"] == grown["prompt_tokens_total"] + grown["generation_tokens_total"]
    queue, prefill, decode, inference = (
        grown[f"request_{name}_time_seconds_sum"] for name in ("queue", "prefill", "decode", "inference")
    )
    assert inference == pytest.approx(prefill + decode)
    assert grown["time_to_first_token_seconds_sum"] == pytest.approx(queue + prefill)
    assert grown["inter_token_latency_seconds_sum"] == pytest.approx(decode)
    assert queue + inference <= grown["e2e_request_latency_seconds_sum"]
    assert now["num_requests_waiting_by_reason"] == now["num_requests_waiting"]


@pytest.mark.usefixtures("real_parts")
def test_an_aborted_request_is_in_no_histogram(engine: EngineProcess) -> None:
    before = samples(engine)
    body = {"prompt": "gone", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with httpx2.stream("POST", f"{engine.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        next(answer.iter_lines())
    wait_for(lambda: samples(engine)["num_requests_running"] == 0)
    name = "e2e_request_latency_seconds_count"
    assert samples(engine)[name] == before[name]
