"""A process that generates offline with one engine, for `benchmarks.vllm`: a line of JSON in, a line of JSON out.

    python -P benchmarks/generate_process.py {kvscope|vllm|transformers} CHECKPOINT SETTINGS

SETTINGS are JSON, by EngineConfig's names, which are vLLM's. In: {"prompts": [[token ids]], "max_tokens": N}. Out:
{"seconds": s, "tokens": [[token ids]]}, the seconds those of the one call that generates. It runs under any Python that
has the chosen engine, so it imports nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]


def main() -> None:
    engine, checkpoint, settings = sys.argv[1:]
    # What the engines print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    generate: Generate = ENGINES[engine](checkpoint, json.loads(settings))
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        tokens = generate(asked["prompts"], asked["max_tokens"])
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


def kvscope(checkpoint: str, settings: dict[str, Any]) -> Generate:
    from kvscope.engine.requests.request import SamplingParams
    from kvscope.engine.serving.llm import LLM

    llm = LLM(checkpoint, **settings)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    return generate


def vllm(checkpoint: str, settings: dict[str, Any]) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(checkpoint, enforce_eager=True, **settings)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(asked, params, use_tqdm=False)]

    return generate


def transformers(checkpoint: str, _: dict[str, Any]) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        # No token is -1, so nothing ends early.
        config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, eos_token_id=-1)
        outputs = model.generate_batch(prompts, generation_config=config, persistent_manager=True).values()
        by_prompt = {tuple(output.prompt_ids): list(output.generated_tokens) for output in outputs}
        return [by_prompt[tuple(prompt)] for prompt in prompts]

    return generate


ENGINES = {"kvscope": kvscope, "vllm": vllm, "transformers": transformers}

if __name__ == "__main__":
    main()
