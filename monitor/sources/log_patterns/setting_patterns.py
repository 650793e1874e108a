"""Models and shares of the device that a text names where it starts an engine: a command, or code."""

from __future__ import annotations

from typing import Final

from .pattern import LogPattern

_MODEL_NAME: Final = r"(?P<model>[A-Za-z0-9][\w.-]{1,80}(?:/[A-Za-z0-9][\w.-]{1,80})?)"

SETTING_PATTERNS: Final = (
    LogPattern(
        "model_named",
        "vllm",
        "any",
        "--model",
        rf"--model[ =][\"']?{_MODEL_NAME}",
        "vllm bench latency --model google/gemma-3-4b-it",
    ),
    LogPattern(
        "model_named",
        "vllm",
        "any",
        "LLM(model=",
        rf"\bLLM\(model=[\"']{_MODEL_NAME}[\"']",
        'llm = LLM(model="gpt2", gpu_memory_utilization=0.70)',
    ),
    LogPattern(
        "model_named",
        "vllm",
        "any",
        "vllm serve",
        rf"\bvllm serve {_MODEL_NAME}",
        "vllm serve google/gemma-3-4b-it --max-model-len 32768",
    ),
    LogPattern(
        "share_named",
        "vllm",
        "0.2 to 0.33",
        "gpu_memory_utilization=",
        r"gpu_memory_utilization=(?P<share>[01]?\.\d{1,4})\b",
        'llm = LLM(model="gpt2", gpu_memory_utilization=0.70)',
    ),
    LogPattern(
        "share_named",
        "vllm",
        "0.2 to 0.33",
        "--gpu-memory-utilization",
        r"--gpu-memory-utilization[ =](?P<share>[01]?\.\d{1,4})\b",
        "vllm serve gpt2 --gpu-memory-utilization 0.7",
    ),
)
