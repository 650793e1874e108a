"""Fields, bodies and routes that clients of OpenAI's and vLLM's APIs use, with a real server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from tests.engine.process import PATIENCE_S, EngineProcess

pytestmark = pytest.mark.usefixtures("real_parts")

if TYPE_CHECKING:
    import openai

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess("--num-gpu-blocks-override", "65", "--max-model-len", "4096") as engine:
        yield engine


@pytest.fixture
def client(engine: EngineProcess) -> Iterator[openai.OpenAI]:
    import openai

    with closing(
        openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    ) as client:
        yield client


def test_unknown_fields_are_ignored_and_logged_once(engine: EngineProcess) -> None:
    sent = {"store": False, "metadata": {"a": "b"}, "reasoning_effort": "low", "best_of": 2, "temprature": 1}
    plain = {"prompt": "hello", "max_tokens": 5, "temperature": 0}
    answers = [
        httpx2.post(f"{engine.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
        for body in (plain, plain | sent, plain | sent)
    ]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert all(engine.log().count(f"the field '{name}'") == 1 for name in sent)
    turns = [
        {"role": "user", "content": "a", "refusal": None},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]},
        {"role": "tool", "content": "b", "tool_call_id": "1"},
    ]
    body = {"messages": turns, "max_tokens": 2, "tool_choice": "none"}
    assert httpx2.post(f"{engine.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).status_code == 200


@pytest.mark.parametrize(
    "content", [b'{"prompt": "\xff"}', b'{"prompt": "a", "model": "\xff"}', b"\xff", b"[" * 100_000]
)
def test_a_body_that_is_no_utf8_or_too_deep_is_a_bad_request(engine: EngineProcess, content: bytes) -> None:
    answer = httpx2.post(f"{engine.url}/v1/completions", content=content, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert "Traceback" not in engine.log()


def test_the_answer_names_what_stopped_it(client: openai.OpenAI, engine: EngineProcess) -> None:
    text = client.completions.create(prompt="stop", max_tokens=40, **GREEDY).choices[0].text
    asked = {"prompt": "stop", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stop": [text[8:10]]}

    def first(**more: Any) -> dict[str, Any]:
        answer = httpx2.post(f"{engine.url}/v1/completions", json=asked | more, timeout=PATIENCE_S)
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    place = text.index(text[8:10])
    assert (first()["text"], first()["stop_reason"]) == (text[:place], text[8:10])
    assert first(include_stop_str_in_output=True)["text"] == text[: place + 2]
    assert first(stop=[])["stop_reason"] is None
    choices = {"structured_outputs": {"choice": ["yes", 'n"o']}}
    chosen = {first(stop=[], temperature=1, ignore_eos=False, seed=seed, **choices)["text"] for seed in range(9)}
    assert chosen == {"yes", 'n"o'}


def test_usage_may_come_with_every_chunk(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"prompt": "hello", "max_tokens": 4, "stream": True, "stream_options": options, **GREEDY}
    chunks = list(client.completions.create(**asked))
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [1, 2, 3, 4, 4]


def test_tokens_there_and_back_and_what_probes_ask(engine: EngineProcess) -> None:
    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = httpx2.post(f"{engine.url}/{path}", json=body, timeout=PATIENCE_S).json()
        return answer

    reported = post("tokenize", {"prompt": "héllo", "return_token_strs": True})
    assert reported["tokens"] == [256, *"héllo".encode()]
    assert (reported["count"], reported["max_model_len"], reported["token_strs"][1]) == (7, 4096, "h")
    assert post("detokenize", {"tokens": reported["tokens"]}) == {"prompt": "héllo"}
    assert post("tokenize", {"messages": [{"role": "user", "content": "a"}]})["tokens"][0] == 256
    assert post("tokenize", {})["error"]["param"] == "prompt"
    assert post("detokenize", {"tokens": [9999]})["error"]["param"] == "tokens"
    assert httpx2.get(f"{engine.url}/ping").status_code == 200
    assert httpx2.get(f"{engine.url}/load").json() == {"server_load": 0}
    assert httpx2.get(f"{engine.url}/version").json()["version"]
