"""What is read out of a person's report, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.monitor.sources.incident_report import stated_facts

DATA = Path(__file__).parent.parent / "data"
BENCH = "vllm bench serve --input-len 80000 --output-len 800"


def reported(*lines: str) -> dict[str, object]:
    return {name: value for _, name, value in stated_facts(lines)}


def test_the_report_of_a_collapse() -> None:
    lines = (DATA / "seed-001.txt").read_text().splitlines()
    found = reported(*lines)
    expected = {
        "version": "0.18.0",
        "model": "Qwen3.5-9B",
        "served_model_name": "default_model",
        "port": 8000,
        "max_num_batched_tokens": 64 << 10,
        "max_num_seqs": 128,
        "enable_prefix_caching": "False",
        "load_input_len": 80000,
        "load_output_len": 800,
        "load_num_prompts": 60,
        "load_concurrencies": "18, 15",
        "usage_fell_from": 1.0,
        "usage_fell_to": 0.0,
        "usage_peak_told": 0.821,
        "preemptions_told": 0,
    }
    assert {name: found[name] for name in expected} == expected
    for line, name, value in stated_facts(lines):
        if name.startswith("load_") and isinstance(value, int):
            assert str(value) in lines[line - 1]


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        (f"{BENCH} --max-concurrency 18", "load_concurrencies", "18"),
        (f"{BENCH} --max-concurrency=18", "load_concurrencies", "18"),
        ("python benchmark_serving.py --random-input-len 1k --random-output-len 128", "load_input_len", 1000),
        ("python -m sglang.bench_serving --random-input 1K --random-output 1", "load_input_len", 1024),
        ("the same with a concurrency of 15", "load_concurrencies", "15"),
        ("it happens with 15 concurrent clients", "load_concurrencies", "15"),
        ("15并发", "load_concurrencies", "15"),
        ("the KV cache drops from 99.5 % to 0 %", "usage_fell_from", 0.995),
        ("the KV cache drops from 99.5 % to 0 %", "usage_fell_to", 0.0),
        ("python -m vllm.entrypoints.openai.api_server --model a/b --port 9000", "model", "a/b"),
        ("vllm serve a/b --gpu-memory-utilization 0.85", "gpu_memory_utilization", 0.85),
        ("vllm serve a/b --enable-prefix-caching -tp 8", "enable_prefix_caching", "True"),
        ("no preemptions in the log", "preemptions_told", 0),
        ("on vLLM v0.11.2", "version", "0.11.2"),
    ],
)
def test_in_several_ways_of_saying_it(line: str, name: str, value: object) -> None:
    assert reported(line)[name] == value


@pytest.mark.parametrize(
    "line",
    [
        "Maximum concurrency for 262,144 tokens per request: 5.70x",
        "GPU utilization falls from 100% to 0%",  # not of the cache
        "the KV cache goes from 40% to 30%",
        "the cache is at 100% of its size, and we have read 12 pages, and 0% of them help",
        "vLLM is fast, and concurrency matters",
        "",
    ],
)
def test_what_tells_nothing(line: str) -> None:
    assert reported(line) == {}


def test_a_command_over_several_lines_is_one() -> None:
    lines = [
        "$ vllm bench serve \\",
        "    --max-concurrency 18 \\",
        "    --input-len 80000 \\",
        "    --output-len 800",
        "",
    ]
    found = stated_facts(lines)
    assert {(name, value) for _, name, value in found} == {
        ("load_concurrencies", "18"),
        ("load_input_len", 80000),
        ("load_output_len", 800),
    }
    assert {line for line, _, _ in found} == {1}
    assert reported("vllm bench serve --input-len 7 \\") == {"load_input_len": 7}
