"""Serves a model through the kernels in Triton's interpreter, and prints its tokens and those of transformers as JSON.

TRITON_INTERPRET=1 python -m tests.kernels.whole_model DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvscope.engine.config import EngineConfig
from kvscope.engine.core.engine_core import EngineCore
from kvscope.engine.models import load_model
from kvscope.engine.requests.request import SamplingParams
from tests.engine import checkpoints

MAX_TOKENS = 3
LONGEST = 40
STEP_TOKENS = 24
"""Fewer than a prompt: chunks behind a prefix stand in one step with decodes."""


def main() -> None:
    directory = Path(sys.argv[1])
    # A layer that sees everything, others with a window shorter than the prompts, and norms of heads.
    model = checkpoints.save("qwen3-window", directory)
    prompts = checkpoints.prompts(3, LONGEST, seed=7)
    # Not eager: steps of decodes only are padded as for a graph.
    config = EngineConfig(model=str(directory), block_size=16, max_num_batched_tokens=STEP_TOKENS, enforce_eager=False)
    core = EngineCore(config, load_model(config))
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    tokens: dict[int, list[int]] = {core.submit("", prompt, params): [] for prompt in prompts}
    while core.in_flight:
        for output in core.step():
            tokens[output.number] += output.token_ids
    core.close()
    expected = [checkpoints.generate(model, prompt, MAX_TOKENS) for prompt in prompts]
    print(json.dumps({"kernels": list(tokens.values()), "transformers": expected}))


if __name__ == "__main__":
    main()
