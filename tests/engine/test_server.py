"""A real server and the real OpenAI client: texts, streams, refusals, clients that go away, stalls, the end."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvscope.engine.serving.openai_protocol import BadRequest, CompletionRequest, parse_request
from kvscope.monitor.contract.samples import Fact
from kvscope.monitor.contract.trace_context import parse_traceparent
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.sources.engine_log import Log
from tests.engine.process import PATIENCE_S, EngineProcess, follow, wait_for
from tests.engine.test_grammar import NOTHING, REGEX, SCHEMA

if TYPE_CHECKING:
    import openai

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    """One for the tests that leave it as it was: idle."""
    settings = ("--num-gpu-blocks-override", "65", "--max-model-len", "4096", "--stall-seconds", "0.5")
    settings += ("--fault", "stuck.never-fits")  # so that something can stall
    with EngineProcess(*settings) as engine:
        yield engine


@pytest.fixture
def client(engine: EngineProcess) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def metrics(engine: EngineProcess) -> dict[str, float]:
    """Every sample of /metrics by name; of those with more labels than model and engine, by name and label."""
    found = {}
    for family in text_string_to_metric_families(httpx2.get(f"{engine.url}/metrics").text):
        for sample in family.samples:
            more = [value for label, value in sample.labels.items() if label not in ("model_name", "engine")]
            found[":".join((sample.name.removeprefix("vllm:"), *more))] = sample.value
    return found


def test_a_completion(client: openai.OpenAI, engine: EngineProcess) -> None:
    made = client.completions.create(prompt="hello", max_tokens=9, **GREEDY)
    assert made.object == "text_completion"
    assert made.choices[0].finish_reason == "length"
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len("hello") + 1, 9)
    named = client.completions.create(prompt="hello", max_tokens=9, extra_headers={"X-Request-Id": "mine"}, **GREEDY)
    assert named.id == "cmpl-mine"
    assert named.choices[0].text == made.choices[0].text
    by_ids = client.completions.create(prompt=[256, *b"hello"], max_tokens=9, **GREEDY)
    assert by_ids.choices[0].text == made.choices[0].text
    several = client.completions.create(prompt=["hello", "other", "hello"], max_tokens=9, **GREEDY)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert several.choices[0].text == several.choices[2].text == made.choices[0].text != several.choices[1].text
    assert client.models.list().data[0].id == "tiny"


def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=["hello", "other"], max_tokens=12, **GREEDY)
    pieces: dict[int, str] = {0: "", 1: ""}
    reasons: dict[int, str] = {}
    usages = []
    for chunk in client.completions.create(
        prompt=["hello", "other"], max_tokens=12, stream=True, stream_options={"include_usage": True}, **GREEDY
    ):
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert pieces == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {0: "length", 1: "length"}
    assert usages == [whole.usage]


def test_a_chat_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 10, **GREEDY}
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert message.role == "assistant"
    chunks = list(client.chat.completions.create(stream=True, **asked))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    in_parts = client.chat.completions.create(**asked | {"messages": [{"role": "user", "content": parts}]})
    assert in_parts.usage == whole.usage


def test_several_answers_to_one_prompt_are_those_of_the_seeds_that_follow(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["one", "two"], "max_tokens": 8, "temperature": 1}
    alone = {
        (prompt, seed): client.completions.create(**asked | {"prompt": prompt, "seed": seed}).choices[0].text
        for prompt in asked["prompt"]
        for seed in (5, 6, 7)
    }
    assert len(set(alone.values())) == 6
    together = client.completions.create(**asked, n=3, seed=5)
    assert [choice.text for choice in together.choices] == list(alone.values())
    assert together.usage is not None
    assert (together.usage.prompt_tokens, together.usage.completion_tokens) == (2 * 4, 6 * 8)
    pieces = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(**asked, n=3, seed=5, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert list(pieces.values()) == list(alone.values())
    chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], n=2, max_tokens=3)
    assert [choice.index for choice in chat.choices] == [0, 1]


def test_logprobs_of_a_completion_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": "likely", "max_tokens": 20, "logprobs": 3, **GREEDY}
    whole = client.completions.create(**asked).choices[0].logprobs
    assert whole is not None
    assert whole.tokens is not None
    assert whole.top_logprobs is not None
    assert whole.token_logprobs is not None
    assert len(whole.tokens) == 20
    assert whole.text_offset == [len("".join(whole.tokens[:place])) for place in range(20)]
    for token, logprob, top in zip(whole.tokens, whole.token_logprobs, whole.top_logprobs, strict=True):
        assert logprob == top[token] == max(top.values()) < 0
        assert len(top) <= 3
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(stream=True, **asked)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts for value in getattr(part, name)] == getattr(whole, name)
    assert client.completions.create(**asked | {"logprobs": None}).choices[0].logprobs is None


def test_logprobs_of_a_chat_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "logprobs": True}
    asked |= {"top_logprobs": 2, **GREEDY}
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert len(whole.content) == 20
    for one in whole.content:
        assert len(one.top_logprobs) == 2
        assert (one.token, one.logprob) == (one.top_logprobs[0].token, one.top_logprobs[0].logprob)
        assert one.bytes == (None if one.token == "\ufffd" else list(one.token.encode()))
    reported = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(stream=True, **asked)]
    assert [one for part in reported if part for one in part.content or []] == whole.content
    without = client.chat.completions.create(**asked | {"top_logprobs": None}).choices[0].logprobs
    assert without is not None
    assert [one.top_logprobs for one in without.content or []] == [[]] * 20


@pytest.mark.parametrize("temperature", [0, 1])
def test_structured_output_of_a_chat_whole_and_as_a_stream(client: openai.OpenAI, temperature: int) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "pool", "schema": SCHEMA, "strict": True}}
    messages = [{"role": "user", "content": "Which block?"}]
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": messages,
        "response_format": wanted,
        "temperature": temperature,
        "seed": 3,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.message.content or ""), SCHEMA)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **asked)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == "stop"
    for kind in ("json_object", "text"):
        asked |= {"response_format": {"type": kind}, "max_tokens": 5}
        content = client.chat.completions.create(**asked).choices[0].message.content or ""
        assert content.startswith("{") == (kind == "json_object")


def test_structured_output_of_a_completion(client: openai.OpenAI) -> None:
    """vLLM's field, which its users send in `extra_body`; each of several outputs goes its own way."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": "a", "n": 3, "seed": 1, "temperature": 1, "max_tokens": 200}
    made = client.completions.create(**asked, extra_body={"structured_outputs": {"regex": REGEX}})
    assert all(re.fullmatch(REGEX, choice.text) and choice.finish_reason == "stop" for choice in made.choices)
    assert len({choice.text for choice in made.choices}) > 1
    made = client.completions.create(**asked, extra_body={"structured_outputs": {"json": json.dumps(SCHEMA)}})
    for choice in made.choices:
        jsonschema.validate(json.loads(choice.text), SCHEMA)


def test_a_grammar_that_nothing_fits_is_said_to_its_client(client: openai.OpenAI) -> None:
    from openai import APIError, BadRequestError

    asked: dict[str, Any] = {"model": "tiny", "prompt": "a", "extra_body": {"structured_outputs": {"regex": NOTHING}}}
    with pytest.raises(BadRequestError, match="structured_outputs: regex cannot be used") as refused:
        client.completions.create(**asked)
    assert refused.value.param == "structured_outputs"
    with pytest.raises(APIError, match="structured_outputs: regex cannot be used"):
        list(client.completions.create(stream=True, **asked))


def test_what_a_benchmark_of_vllm_sends_is_served(engine: EngineProcess) -> None:
    """The fields that `vllm bench serve` sends, for completions and for chats; a chunk for each token."""
    common = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    text = {"prompt": "a", "repetition_penalty": 1.0, "max_tokens": 5, "logprobs": None, "temperature": 0.0, **common}
    content = [{"type": "text", "text": "a"}]
    chat = {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 5, "top_p": 1.0, **common}
    for path, body, more in (("completions", text, 0), ("chat/completions", chat, 1)):
        answer = httpx2.post(f"{engine.url}/v1/{path}", json=body, timeout=PATIENCE_S)
        chunks = answer.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
        bodies = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
        assert len([body for body in bodies if body["choices"]]) == 5 + more
        assert bodies[-1]["usage"]["completion_tokens"] == 5


def test_a_stop_string_ends_a_text_and_frees_its_request(client: openai.OpenAI, engine: EngineProcess) -> None:
    text = client.completions.create(prompt="stop", max_tokens=40, **GREEDY).choices[0].text
    stop = text[8:10]
    stopped = metrics(engine)["request_success_total:stop"]
    for stream in (False, True):
        asked: dict[str, Any] = {"prompt": "stop", "max_tokens": 3000, "stop": [stop], **GREEDY}
        if stream:
            choices = [chunk.choices[0] for chunk in client.completions.create(stream=True, **asked)]
            made, reason = "".join(choice.text for choice in choices), choices[-1].finish_reason
        else:
            choice = client.completions.create(**asked).choices[0]
            made, reason = choice.text, choice.finish_reason
        assert (made, reason) == (text[: text.index(stop)], "stop")
    wait_for(lambda: metrics(engine)["num_requests_running"] == 0)
    assert metrics(engine)["request_success_total:stop"] == stopped + 2
    assert metrics(engine)["kv_cache_usage_perc"] == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "says"),
    [
        ("completions", {"prompt": "a", "max_tokens": "many"}, 400, "max_tokens", "Expected `int"),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p", "above 0"),
        ("completions", {"prompt": "a", "n": 0}, 400, "n", "must be 1 to"),
        ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix", "not supported"),
        ("chat/completions", {"messages": [{"role": "u"}], "tools": [{}]}, 400, "tools", "not supported"),
        ("completions", {"prompt": "a", "logit_bias": {"259": 1}}, 400, "logit_bias", "last one is 258"),
        ("completions", {"prompt": "a", "logit_bias": {"1": 101}}, 400, "logit_bias", "-100 to 100"),
        ("completions", {"prompt": "a", "min_tokens": 17}, 400, "min_tokens", "max_tokens, which is 16"),
        ("completions", {"prompt": "a", "structured_outputs": {"choice": []}}, 400, "structured_outputs", "one text"),
        ("completions", {"prompt": ["a"] * 17, "n": 128}, 400, "prompt", "2,048 texts"),
        ("completions", {"prompt": "a" * 5000}, 400, "prompt", "5,000 characters"),
        ("chat/completions", {"messages": [{"role": "u", "content": "a" * 5000}]}, 400, "messages", "5,000 char"),
        ("completions", {"prompt": "a", "structured_outputs": {"regex": "("}}, 400, "structured_outputs", "unclosed"),
        ("completions", {"prompt": "a", "structured_outputs": {}}, 400, "structured_outputs", "exactly one"),
        ("completions", {"prompt": "a", "structured_outputs": {"lark": "a"}}, 400, "structured_outputs.lark", "field"),
        ("completions", {"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format.type", "Invalid"),
        ("completions", {"prompt": "a", "response_format": {"type": "json_schema"}}, 400, "response_format", "goes"),
        ("completions", {"prompt": "a", "min_p": 2}, 400, "min_p", "0 (all) to 1"),
        ("completions", {"prompt": "a", "presence_penalty": 2.1}, 400, "presence_penalty", "-2 to 2"),
        ("completions", {"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty", "above 0"),
        ("completions", {"prompt": "a", "seed": 1 << 63}, 400, "seed", "at most"),
        ("completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs", "0 to 20"),
        ("chat/completions", {"messages": [{"role": "u"}], "top_logprobs": 1}, 400, "top_logprobs", "needs"),
        ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options", "stream"),
        ("completions", {"prompt": "a", "model": "other"}, 404, "model", "'tiny' is"),
        ("completions", {"prompt": "a" * 4096}, 400, "prompt", "max_model_len is 4096"),
        ("completions", {"prompt": [1, 9999]}, 400, "prompt", "vocabulary"),
        ("completions", {"prompt": [1, "a"]}, 400, "prompt", "must be a text"),
        ("completions", {"prompt": []}, 400, "prompt", "must be a text"),
        ("completions", {}, 400, "prompt", "missing required"),
        (
            "chat/completions",
            {
                "messages": [{"role": "u"}],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "array", "items": {"type": "int"}}},
                },
            },
            400,
            "response_format",
            "type: int",
        ),
        ("chat/completions", {"messages": []}, 400, "messages", "at least one"),
        ("chat/completions", {"messages": [{"content": "a"}]}, 400, "messages[0].role", "missing required"),
        ("embeddings", {}, 404, None, "Not Found"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    engine: EngineProcess, path: str, body: dict[str, Any], status: int, param: str | None, says: str
) -> None:
    answer = httpx2.post(f"{engine.url}/v1/{path}", json=body, timeout=PATIENCE_S)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_body_that_is_no_json_and_an_id_that_is_none(engine: EngineProcess) -> None:
    answer = httpx2.post(f"{engine.url}/v1/completions", content=b"{")
    assert answer.status_code == 400
    assert "not JSON" in answer.json()["error"]["message"]
    spaced = httpx2.post(f"{engine.url}/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "a b"})
    assert spaced.status_code == 400
    assert spaced.json()["error"]["param"] == "X-Request-Id"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_blocks(engine: EngineProcess, stream: bool) -> None:
    ledger = EngineLedger(engine.engine)
    name = f"gone-{stream}"
    with closing(engine.stream()) as live:
        follow(live, [ledger], lambda: ledger.ready)
        gone_before = ledger.state.totals.client_gone
        body = {"prompt": "for ever", "max_tokens": 900, "ignore_eos": True, "stream": stream}
        with socket.create_connection(_address(engine)) as connection:
            connection.sendall(_post("/v1/completions", body, {"X-Request-Id": name}))

            def serving() -> bool:
                record = ledger.request(f"cmpl-{name}")
                return record is not None and record.is_running and record.output_tokens > 2

            follow(live, [ledger], serving)
            assert ledger.state.used > 0
        follow(live, [ledger], lambda: ledger.state.used == 0)
        record = ledger.request(f"cmpl-{name}")
        assert record is not None
        assert record.client_gone_ns > 0
        assert record.output_tokens < 900
        assert ledger.state.totals.client_gone == gone_before + 1
        assert list(ledger.anomalies) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [("completions", {"prompt": "a"}), ("chat/completions", {"messages": [{"role": "user", "content": "a"}]})],
)
def test_a_request_is_part_of_its_callers_trace(engine: EngineProcess, path: str, body: dict[str, Any]) -> None:
    header = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    ledger = EngineLedger(engine.engine)
    with closing(engine.stream()) as live:
        follow(live, [ledger], lambda: ledger.ready)
        ids = []
        for traceparent in (header, "not a trace"):
            answer = httpx2.post(
                f"{engine.url}/v1/{path}",
                json={**body, "max_tokens": 2, "model": "tiny"},
                headers={"traceparent": traceparent},
            )
            assert answer.status_code == 200
            ids.append(answer.json()["id"])
        # By id: requests of other tests may end meanwhile.
        follow(live, [ledger], lambda: {*ids} <= {record.id for record in ledger.ended})
        traces = {record.id: record.trace for record in ledger.ended}
        assert [traces[each] for each in ids] == [parse_traceparent(header), None]


def test_health_tells_idle_from_serving_and_from_stalled(engine: EngineProcess) -> None:
    def health() -> httpx2.Response:
        return httpx2.get(f"{engine.url}/health")

    wait_for(lambda: health().json()["status"] == "idle")
    with socket.create_connection(_address(engine)) as connection:
        # 65 blocks of 16 tokens, one of them reserved: a prompt that no empty pool can hold.
        body = {"prompt": "x" * 2000, "max_tokens": 10}
        connection.sendall(_post("/v1/completions", body, {"X-Request-Id": "too-large"}))
        wait_for(lambda: health().status_code == 503)
        reported = health().json()
        assert reported["status"] == "stalled"
        assert [(r["id"], r["state"], r["cause"]) for r in reported["stalled_requests"]] == [
            ("cmpl-too-large", "WAITING", "KV_BLOCKS")
        ]
        ledger = engine.ledger(lambda ledger: any(r.stalled_ns for r in ledger.state.requests.values()))
        assert [record.id for record in ledger.state.requests.values()] == ["cmpl-too-large"]
    wait_for(lambda: health().json()["status"] == "idle")
    assert health().status_code == 200


def test_metrics_count_what_was_served(client: openai.OpenAI, engine: EngineProcess) -> None:
    before = metrics(engine)
    for _ in range(2):
        client.completions.create(prompt="counted, and long enough for two blocks", max_tokens=5, **GREEDY)
    after = metrics(engine)
    grown = {name: after[name] - before[name] for name in after if name.endswith("_total") or "_total:" in name}
    prompt = len("counted, and long enough for two blocks") + 1
    assert grown["prompt_tokens_total"] == 2 * prompt
    assert grown["generation_tokens_total"] == 10
    assert grown["request_success_total:length"] == 2
    assert grown["prefix_cache_queries_total"] == 2 * prompt
    assert grown["prefix_cache_hits_total"] == (prompt - 1) // 16 * 16
    assert grown["num_preemptions_total"] == 0
    assert after["kvscope_engine_blocks:total"] == 65
    assert after["kvscope_engine_blocks:free"] + after["kvscope_engine_blocks:cached_idle"] == 64


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_stops_cleanly_whatever_it_has_in_hand(how: int, tmp_path: Path) -> None:
    with EngineProcess(
        "--num-gpu-blocks-override", "9", "--journal", str(tmp_path), "--fault", "stuck.never-fits"
    ) as engine:
        with socket.create_connection(_address(engine)) as connection:
            connection.sendall(_post("/v1/completions", {"prompt": "x" * 200, "max_tokens": 1}, {}))
            wait_for(lambda: metrics(engine)["num_requests_waiting"] == 1)
            ledger = EngineLedger(engine.engine)
            with closing(engine.stream()) as live:
                follow(live, [ledger], lambda: ledger.ready)
                assert engine.stop(how) == 0
                follow(live, [ledger], lambda: ledger.state.stopped_ns > 0)
            assert b"the engine is stopping" in connection.makefile("rb").read()
        assert ledger.state.used == 0
        assert "Traceback" not in engine.log()


def test_its_log_is_read_as_vllms_is(engine: EngineProcess) -> None:
    log = Log("engine.log", datetime.now(UTC).year)
    records = log.records(engine.log().splitlines())
    facts = {record.name: record.value for record in records if isinstance(record, Fact)}
    assert facts["kv_cache_size_tokens"] == 64 * 16
    assert facts["num_gpu_blocks_override"] == 65
    assert log.engine() == engine.engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--fault", "leak.everything"), "there is no fault 'leak.everything'"),
        (("--num-gpu-blocks-override", "1"), "num_gpu_blocks_override is 1"),
        (("--events", "tcp://0.0.0.0:1"), "could be reached from other machines"),
        (("--kv-connector", "host", "--no-enable-prefix-caching"), "enable_prefix_caching"),
        (("--stall-seconds", "0"), "not above 0"),
        (("--max-num-seqs", "many"), "invalid int value"),
    ],
)
def test_what_cannot_be_started_is_said_in_a_line(arguments: tuple[str, ...], says: str) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "kvscope.engine", "serve", "--port", "0", "--events", "tcp://127.0.0.1:*", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert made.returncode == 2
    assert says in made.stderr
    assert "Traceback" not in made.stderr


def test_a_port_in_use_is_said_in_a_line(engine: EngineProcess) -> None:
    command = [sys.executable, "-m", "kvscope.engine", "serve"]
    host, port = _address(engine)
    for arguments, says in (
        (("--port", str(port), "--events", "tcp://127.0.0.1:*"), f"cannot listen on {host}:{port}"),
        (("--port", "0", "--events", engine.events), f"cannot bind {engine.events}"),
    ):
        made = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
        assert made.returncode == 2
        assert says in made.stderr
        assert "Traceback" not in made.stderr


def _address(engine: EngineProcess) -> tuple[str, int]:
    host, port = engine.url.removeprefix("http://").split(":")
    return host, int(port)


def _post(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes:
    request = httpx2.Request("POST", f"http://engine{path}", json=body, headers=headers)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + request.content


@pytest.mark.slow
def test_more_lists_than_one_request_may_have_are_refused_before_they_are_made() -> None:
    body = b'{"model": "tiny", "prompt": [' + b",".join([b"[1]"] * 3_000) + b"]}"
    with pytest.raises(BadRequest, match="3,000 prompts are more than the 2,048 texts"):
        parse_request(CompletionRequest, body)
