"""Log probabilities of prompts are those that transformers computes, however the engine's steps are cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e .[engine]")

import torch

from kvscope.engine.requests.request import SamplingParams
from kvscope.engine.serving.llm import LLM
from tests.engine import checkpoints
from tests.engine.process import PATIENCE_S, EngineProcess

TOP = 3
ASKED = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=TOP)
CLOSE = 2e-4
"""Of float32 logits that are added up in another order."""
STEPS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "planned ahead": {"max_num_batched_tokens": 32, "max_num_seqs": 4, "async_scheduling": True},
    "preempted": {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 32, "enable_prefix_caching": True},
    "from the host": {"max_num_batched_tokens": 64, "kv_connector": "host"},
}


def expected_of(model: Any, prompt: list[int]) -> torch.Tensor:
    """The log probabilities of all tokens after each token of the prompt but the last."""
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3-window"])
def test_they_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = checkpoints.save(family, tmp_path)
    prompts = checkpoints.prompts(10, 120, seed=3, shared=64)
    expected = [expected_of(model, prompt) for prompt in prompts]
    steps = STEPS if family != "qwen3-window" else {name: STEPS[name] for name in ("chunks", "planned ahead")}
    for name, settings in steps.items():
        with LLM(str(tmp_path), block_size=16, **settings) as llm:
            plain = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
            reported = llm.generate(prompts, ASKED)
            if name == "preempted":
                assert llm.core.scheduler.num_preemptions > 0
        assert [output.outputs for output in reported] == [output.outputs for output in plain], name
        assert all(output.prompt_logprobs is None for output in plain)
        for prompt, output, rows in zip(prompts, reported, expected, strict=True):
            assert output.prompt_logprobs is not None
            first, *others = output.prompt_logprobs
            assert first is None, "nothing precedes the first token"
            for token, at, row in zip(prompt[1:], others, rows, strict=True):
                assert at is not None
                assert at[token].logprob == pytest.approx(float(row[token]), abs=CLOSE)
                assert at[token].rank == pytest.approx(int((row > row[token]).sum()) + 1, abs=1)
                likeliest = [one.logprob for one in sorted(at.values(), key=lambda one: one.rank) if one.rank <= TOP]
                assert likeliest == pytest.approx(row.topk(TOP).values.tolist(), abs=CLOSE)


def test_only_who_asks_is_computed_again(tmp_path: Path) -> None:
    checkpoints.save("llama", tmp_path)
    prompt = max(checkpoints.prompts(8, 100, seed=5), key=len)
    with LLM(str(tmp_path), block_size=16) as llm:
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
        queries = llm.core.scheduler.prefix_queries
        llm.generate([prompt], ASKED)
        assert llm.core.scheduler.prefix_queries == queries, "it is not looked up"
        hits = llm.core.scheduler.prefix_hits
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
        assert llm.core.scheduler.prefix_hits > hits, "others hit what is there"
        assert llm.core.pool.counts()[2] == 0


@pytest.mark.parametrize("count", [-1, 21])
def test_a_count_that_is_none_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="prompt_logprobs is"):
        SamplingParams(prompt_logprobs=count)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess("--num-gpu-blocks-override", "65", "--max-model-len", "512") as engine:
        yield engine


def ask(engine: EngineProcess, status: int = 200, **body: Any) -> dict[str, Any]:
    asked = {"prompt": "hello there", "temperature": 0, "max_tokens": 5, "ignore_eos": True} | body
    answer = httpx2.post(f"{engine.url}/v1/completions", json=asked, timeout=PATIENCE_S)
    assert answer.status_code == status, answer.text
    body = answer.json()
    return body if status != 200 else body["choices"][0]


def test_an_echo_begins_with_the_prompt(engine: EngineProcess) -> None:
    plain = ask(engine)
    assert ask(engine, echo=True)["text"] == "hello there" + plain["text"]
    assert ask(engine, echo=True)["logprobs"] is None
    ids = httpx2.post(f"{engine.url}/tokenize", json={"prompt": "hello there"}, timeout=PATIENCE_S).json()["tokens"]
    assert ask(engine, echo=True, prompt=ids)["text"] == "hello there" + plain["text"]
    only = ask(engine, echo=True, max_tokens=0)
    assert (only["text"], only["finish_reason"]) == ("hello there", "length")
    several = httpx2.post(
        f"{engine.url}/v1/completions",
        json={"prompt": ["one", "two"], "n": 2, "echo": True, "max_tokens": 2, "seed": 1},
        timeout=PATIENCE_S,
    ).json()["choices"]
    assert [choice["text"][:3] for choice in several] == ["one", "one", "two", "two"]


def test_logprobs_of_an_echo_are_those_of_prompt_and_output(engine: EngineProcess) -> None:
    plain, both = ask(engine, logprobs=2)["logprobs"], ask(engine, echo=True, logprobs=2)
    reported, count = both["logprobs"], len(both["logprobs"]["tokens"]) - 5
    assert "".join(reported["tokens"]) == both["text"]
    assert reported["text_offset"] == [len("".join(reported["tokens"][:place])) for place in range(count + 5)]
    assert reported["token_logprobs"][0] is reported["top_logprobs"][0] is None
    assert reported["token_logprobs"][count:] == pytest.approx(plain["token_logprobs"], abs=CLOSE)
    score = ask(engine, echo=True, logprobs=2, max_tokens=0)
    assert score["logprobs"]["token_logprobs"][1:] == pytest.approx(reported["token_logprobs"][1:count], abs=CLOSE)
    assert len(score["logprobs"]["tokens"]) == count
    by_id = ask(engine, prompt_logprobs=2)["prompt_logprobs"]
    assert by_id[0] is None
    for at, logprob in zip(by_id[1:], reported["token_logprobs"][1:count], strict=True):
        assert any(one["logprob"] == pytest.approx(logprob, abs=CLOSE) for one in at.values())
        assert {"logprob", "rank", "decoded_token"} == set(next(iter(at.values())))
    assert score["prompt_logprobs"][0] is None
    assert "prompt_logprobs" not in ask(engine)


def test_a_streamed_echo_is_the_same_text(engine: EngineProcess) -> None:
    for more in ({}, {"max_tokens": 0}):
        whole = ask(engine, echo=True, logprobs=0, **more)
        body = {"prompt": "hello there", "temperature": 0, "max_tokens": 5, "ignore_eos": True, "echo": True}
        streamed = httpx2.post(
            f"{engine.url}/v1/completions", json=body | {"stream": True, "logprobs": 0, **more}, timeout=PATIENCE_S
        )
        chunks = [httpx2.Response(200, text=line[6:]).json() for line in streamed.text.split("\n\n") if "{" in line]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        reported = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        for name in ("tokens", "text_offset"):
            assert [one for each in reported for one in each[name]] == whole["logprobs"][name]


def test_what_cannot_be_told_is_refused(engine: EngineProcess) -> None:
    for body in ({"prompt_logprobs": 1, "stream": True}, {"prompt_logprobs": -1}, {"prompt_logprobs": 21}):
        assert ask(engine, 400, **body)["error"]["param"] == "prompt_logprobs"
    assert ask(engine, 400, max_tokens=0)["error"]["param"] == "max_tokens"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "prompt_logprobs": 0}
    answer = httpx2.post(f"{engine.url}/v1/chat/completions", json=chat, timeout=PATIENCE_S).json()
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
