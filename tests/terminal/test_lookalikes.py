"""Texts that name engines, memory and waiting, and report no problem of KV memory: none may raise a warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvscope.monitor.terminal.cli import main

STATISTICS = (
    "(APIServer pid=1) INFO 11-03 09:{minute}:{second} [loggers.py:259] Engine 000: Avg prompt throughput: {prompt}"
    " tokens/s, Avg generation throughput: {generation} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs,"
    " GPU KV cache usage: {usage}%, Prefix cache hit rate: 61.3%"
)
BUSY = "\n".join(
    STATISTICS.format(minute=at // 6, second=at % 6 * 10, prompt=p, generation=g, running=r, waiting=w, usage=u)
    for at, (p, g, r, w, u) in enumerate(
        [
            (4100.2, 1810.4, 64, 3, 71.2),
            (3900.0, 1795.0, 63, 0, 74.9),
            (4410.7, 1832.1, 64, 7, 82.3),
            (4009.9, 1801.6, 61, 0, 69.0),
            (4222.0, 1820.0, 64, 2, 77.7),
            (4150.3, 1808.8, 62, 0, 72.4),
        ],
        start=60,
    )
)
LOOK_ALIKES = {
    "a slow download": (
        "Downloading the weights is very slow here. vllm serve mistralai/Mistral-7B-Instruct-v0.3 sits at\n"
        "model-00002-of-00003.safetensors:  41%|████      | 2.05G/5.00G [31:12<44:53, 1.10MB/s]\n"
        "Can I point it to a mirror?"
    ),
    "a tokenizer that fails": (
        "[Bug]: Tokenizer cannot be loaded\n\n"
        "ERROR 10-02 08:00:01 [core.py:682] EngineCore failed to start.\n"
        "ERROR 10-02 08:00:01 [core.py:682] ValueError: Tokenizer class ExampleTokenizer does not exist or is not"
        " currently imported."
    ),
    "a driver that is too old": (
        "The server does not come up after the upgrade.\n"
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU"
        " driver.\nvLLM 0.24, gpu_memory_utilization=0.9"
    ),
    "a network time-out": (
        "Our clients see timeouts from time to time:\n"
        "requests.exceptions.ConnectTimeout: HTTPConnectionPool(host='10.0.3.7', port=8000): Max retries exceeded\n"
        "It was the load balancer's firewall. The server itself reports no error."
    ),
    "a busy server": f"Is this good for an L40S? Mean of 1,800 tokens/s with 64 users.\n\n{BUSY}",
    "a busy server without a word": BUSY,
    "a question on a benchmark": (
        "How should I read this?\n"
        "============ Serving Benchmark Result ============\n"
        "Successful requests:                     1000\n"
        "Benchmark duration (s):                  57.81\n"
        "Request throughput (req/s):              17.30\n"
        "Mean TTFT (ms):                          12033.12\n"
        "Which of the two limits is it: the device or my client?"
    ),
    "a wish for a metric": (
        "[Feature]: A gauge for preempted requests\n\n"
        "### The feature, motivation and pitch\n"
        "Requests may thrash: they are preempted again and again while the KV cache is full, and throughput drops."
        " A gauge would let a router see a server that is stuck in this state."
    ),
    "a question on the share": (
        "[Doc]: What does gpu_memory_utilization include?\n\n"
        "The page says 0.9 by default. Does the share contain the CUDA graphs, or do they come on top? And is the KV"
        " cache what remains of it?"
    ),
    "a wrong chat template": (
        "The answers end with <|im_end|> and repeat the question. With transformers they are fine. I think that the"
        " chat template of the model is not used. vLLM 0.21, one A100."
    ),
    "a request that is too long": (
        "openai.BadRequestError: Error code: 400 - {'object': 'error', 'message': \"This model's maximum context"
        " length is 8192 tokens. However, you requested 9120 tokens in the messages. Please reduce the length of the"
        " messages.\", 'code': 400}"
    ),
    "a process that was asked to end": (
        "INFO 06-02 01:41:20 [launcher.py:80] SIGTERM received, shutting down.\n"
        "INFO:     Shutting down\nINFO:     Waiting for application shutdown.\n"
        "INFO:     Application shutdown complete."
    ),
    "an assertion in a kernel": (
        "[Bug]: Crash with FP8 weights\n\n"
        "ERROR 07-30 10:12:01 [dump_input.py:69] Dumping input data for V1 LLM engine (v0.22.0) with config:"
        " model='m',\n"
        "ERROR 07-30 10:12:01 [core.py:710] AssertionError: scale must be contiguous"
    ),
    "hangs and leaks that are denied": (
        "The upgrade went well. We ran it for a day: it did not hang, there is no memory leak, and the queue was never"
        " stuck. Thanks!"
    ),
    "a router that the kernel killed": (
        "The router pod is restarted by Kubernetes because of OOM (memory limit of 2 GB). The engines behind it serve"
        " without a restart."
    ),
    "a German note on a driver": (
        "Der Server startet nach dem Update nicht mehr, der Treiber ist zu alt.\n"
        "RuntimeError: Found no NVIDIA driver on your system."
    ),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_text_without_a_problem_of_kv_memory_raises_no_warning(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.txt"
    report.write_text(LOOK_ALIKES[name] + "\n")
    main(["doctor", str(report), "--format", "json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [(f["code"], f["verdict"]) for f in findings if f["severity"] != "info"] == []


def test_the_same_words_without_the_denial_or_the_wish_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.txt"
    for text, code in (
        (LOOK_ALIKES["a wish for a metric"].split("pitch\n")[1], "thrash.preemption"),
        ("After a day it hangs, the KV cache is full and requests are never scheduled.", "stuck.never-fits"),
        ("There is a memory leak: after all requests finish, the KV cache is not freed.", "leak.finished-held"),
        (LOOK_ALIKES["a router that the kernel killed"], "held.not-memory"),
    ):
        report.write_text(text + "\n")
        main(["doctor", str(report), "--format", "json"])
        assert code in [f["code"] for f in json.loads(capsys.readouterr().out)["findings"]]
