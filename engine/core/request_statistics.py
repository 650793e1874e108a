"""How long requests wait and run, and how many tokens they have, as histograms with vLLM's names and bounds.

The engine's thread counts, and /metrics reads. Each interval covers the same as in vLLM (`vllm/v1/metrics/stats.py`):
queue from arrival to the first admission, prefill from there to the first token, decode from there to the last,
inference from admission to the last token. Preemptions in between are part of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from kvscope.engine.requests.request import Request

LATENCY_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""vLLM's bounds, as all that follow."""
FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
TOKENS_OF_A_STEP: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS: Final = (1, 2, 3, 4, 5, 10, 20)
S_PER_NS: Final = 1e-9


class BucketCounts:
    """Counts of values by upper bound. The last count is of those above all bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class RequestStatistics:
    """The request statistics of vLLM's dashboards. `max_model_len` bounds the histograms of tokens."""

    def __init__(self, max_model_len: int) -> None:
        tokens = token_bounds(max_model_len)
        self.histograms: dict[str, BucketCounts] = {
            "time_to_first_token_seconds": BucketCounts(FIRST_TOKEN_S),
            "inter_token_latency_seconds": BucketCounts(BETWEEN_TOKENS_S),
            "request_time_per_output_token_seconds": BucketCounts(BETWEEN_TOKENS_S),
            "e2e_request_latency_seconds": BucketCounts(LATENCY_S),
            "request_queue_time_seconds": BucketCounts(LATENCY_S),
            "request_inference_time_seconds": BucketCounts(LATENCY_S),
            "request_prefill_time_seconds": BucketCounts(LATENCY_S),
            "request_decode_time_seconds": BucketCounts(LATENCY_S),
            "request_prompt_tokens": BucketCounts(tokens),
            "request_generation_tokens": BucketCounts(tokens),
            "request_max_num_generation_tokens": BucketCounts(tokens),
            "request_params_max_tokens": BucketCounts(tokens),
            "request_num_preemptions": BucketCounts(PREEMPTIONS),
            "iteration_tokens_total": BucketCounts(TOKENS_OF_A_STEP),
        }
        """By name, without vLLM's prefix."""
        self._first = self.histograms["time_to_first_token_seconds"]
        self._between = self.histograms["inter_token_latency_seconds"]

    def token(self, request: Request, now_ns: int) -> None:
        """Count a token that the request was given."""
        if request.first_token_ns:
            self._between.observe((now_ns - request.last_token_ns) * S_PER_NS)
        else:
            request.first_token_ns = now_ns
            self._first.observe((now_ns - request.arrived_ns) * S_PER_NS)
        request.last_token_ns = now_ns

    def step(self, tokens: int) -> None:
        """Count a step that computed so many tokens of prompts, and sampled the others."""
        self.histograms["iteration_tokens_total"].observe(tokens)

    def finished(self, request: Request, now_ns: int) -> None:
        """Count a request that has ended. Intervals that it never began are 0, as in vLLM."""
        outputs = len(request.output_token_ids)
        first, last = request.first_token_ns, request.last_token_ns
        admitted = request.admitted_ns or now_ns
        decode_s = (last - first) * S_PER_NS
        self._observe("e2e_request_latency_seconds", (now_ns - request.arrived_ns) * S_PER_NS)
        self._observe("request_queue_time_seconds", (admitted - request.arrived_ns) * S_PER_NS)
        self._observe("request_prefill_time_seconds", (first - admitted) * S_PER_NS if first else 0.0)
        self._observe("request_decode_time_seconds", decode_s)
        self._observe("request_inference_time_seconds", (last - admitted) * S_PER_NS if last else 0.0)
        self._observe("request_time_per_output_token_seconds", decode_s / (outputs - 1) if outputs > 1 else 0.0)
        self._observe("request_prompt_tokens", request.num_prompt_tokens)
        self._observe("request_generation_tokens", outputs)
        self._observe("request_max_num_generation_tokens", outputs)
        self._observe("request_params_max_tokens", request.params.max_tokens)
        self._observe("request_num_preemptions", request.num_preemptions)

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)


def token_bounds(most: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50, … up to `most`: vLLM's bounds of counts of tokens."""
    bounds = [step * 10**power for power in range(len(str(most))) for step in (1, 2, 5)]
    return [bound for bound in bounds if bound <= most]
