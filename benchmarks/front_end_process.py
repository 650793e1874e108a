"""The cost of the probe for vLLM's front end: run by a Python that has vLLM, for `benchmarks.front_end`.

    PYTHONPATH=. PYTHON -m benchmarks.front_end_process ENDPOINT ROUNDS TOKENS…

For each TOKENS, requests with answers of that length pass the OutputProcessor that AsyncLLM calls, in turns with and
without the probe's hooks in it, which report to ENDPOINT. Prints, for each round, how many microseconds of CPU time a
request took in the front end's thread and in the whole process, without and with the hooks:
{TOKENS: [[[thread, process], [thread, process]], …]}.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

from kvscope.monitor.probes.vllm.front_end_hooks import FrontEndReporter, watch_front_end

REQUESTS = 400
WARM_UP = 20
PROMPT = [1 + n % 300 for n in range(200)]
HOOKED = ("add_request", "abort_requests", "_finish_request")


class FrontEnd:
    """vLLM's OutputProcessor, whose class has the hooks or not."""

    def __init__(self, endpoint: str) -> None:
        from vllm.v1.engine.output_processor import OutputProcessor

        self.kind: Any = OutputProcessor
        self.processor = OutputProcessor(None, log_stats=False)
        plain = {name: vars(OutputProcessor)[name] for name in HOOKED}
        watch_front_end(FrontEndReporter(lambda _rank: endpoint, lambda: 0))
        self.methods = (plain, {name: vars(OutputProcessor)[name] for name in HOOKED})
        self.came = 0

    def measure(self, hooked: bool, tokens: int) -> tuple[float, float]:
        """CPU time of a request in microseconds: of this thread, and of the process."""
        for name, method in self.methods[hooked].items():
            setattr(self.kind, name, method)
        self.serve(WARM_UP, tokens)
        thread, process = time.thread_time_ns(), time.process_time_ns()
        self.serve(REQUESTS, tokens)
        spent = time.thread_time_ns() - thread, time.process_time_ns() - process
        return spent[0] / REQUESTS / 1000, spent[1] / REQUESTS / 1000

    def serve(self, requests: int, tokens: int) -> None:
        """One request after the other, a token at a time."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
        from vllm.v1.engine.output_processor import RequestOutputCollector

        params = SamplingParams(max_tokens=tokens, detokenize=False, output_kind=RequestOutputKind.DELTA)
        for _ in range(requests):
            self.came += 1
            name = f"cmpl-{self.came}-0-{self.came:08x}"
            request = EngineCoreRequest(
                request_id=name,
                prompt_token_ids=PROMPT,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                external_req_id=name,
            )
            queue = RequestOutputCollector(params.output_kind, request_id=name)
            self.processor.add_request(request, None, queue=queue)
            for index in range(tokens):
                reason = FinishReason.LENGTH if index == tokens - 1 else None
                self.processor.process_outputs([EngineCoreOutput(name, [7], finish_reason=reason)])
                queue.get_nowait()
        assert not self.processor.request_states


def main() -> None:
    endpoint, rounds, *lengths = sys.argv[1:]
    front_end = FrontEnd(endpoint)
    gc.collect()
    gc.freeze()  # as vLLM does once it has started
    measured = {}
    for tokens in map(int, lengths):
        took = []
        for turn in range(int(rounds)):
            pair = [(0.0, 0.0), (0.0, 0.0)]
            for hooked in (False, True) if turn % 2 else (True, False):
                pair[hooked] = front_end.measure(hooked, tokens)
            took.append(pair)
        measured[tokens] = took
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
