"""Schemas, expressions and choices that hurt: each is served or refused by name, and the engine goes on as it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import psutil
import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e .[engine]")

from tests.engine.process import PATIENCE_S, EngineProcess

Schema = Any
MAX_GROWTH = 512 << 20


def nested(levels: int, wrap: Callable[[Schema], Schema]) -> Schema:
    schema: Schema = {"type": "null"}
    for _ in range(levels):
        schema = wrap(schema)
    return schema


def multiples(*numbers: float) -> Schema:
    return {"anyOf": [{"type": "integer", "multipleOf": number} for number in numbers]}


REFUSED: list[dict[str, Schema]] = [
    *(
        {"json": schema}
        for schema in (
            # It goes round and never arrives, or leads elsewhere.
            {"$ref": "#"},
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            {"allOf": [{"$ref": "#"}]},
            {"anyOf": [{"$ref": "#"}]},
            {"oneOf": [{"$ref": "#"}, {"type": "null"}]},
            {"$ref": "#/$defs/none"},
            {"$ref": "http://127.0.0.1:9/x"},
            {"$ref": "file:///etc/passwd"},
            {"$ref": 5},
            {"$ref": "#/%zz~"},
            {"$dynamicRef": "#"},
            # Deep.
            nested(150, lambda schema: {"type": "array", "items": schema}),
            nested(150, lambda schema: {"type": "object", "properties": {"a": schema}}),
            nested(150, lambda schema: {"allOf": [schema]}),
            {"enum": [nested(150, lambda value: [value])]},
            "[" * 60_000,
            # Numbers that take the compiler minutes and gigabytes, or end the process.
            multiples(9_999_991),
            multiples(*range(50_001, 50_011)),
            {"allOf": [multiples(99_991), multiples(99_989)]},
            {"multipleOf": 0},
            {"multipleOf": True},
            {"const": -(1 << 63)},
            {"const": 1 - (1 << 63)},
            {"enum": [1, -(1 << 63)]},
            {"properties": {"a": {"type": "integer", "minimum": -(1 << 63), "maximum": 8 - (1 << 63)}}},
            {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
            {"type": "number", "minimum": -1e308, "maximum": 1e308},
            {"type": "string", "maxLength": 1 << 64},
            '{"minimum": NaN}',
            '{"minimum": 1e999}',
            '{"const": ' + "9" * 5_000 + "}",
            # Nothing fits, or it is no schema.
            {"type": "integer", "minimum": 0.5, "maximum": 0.6},
            {"type": "object", "required": ["a"], "additionalProperties": False},
            {"enum": []},
            {"type": []},
            {"type": 5},
            {"properties": [1]},
            {"type": "array", "items": 5},
            {"x-guidance": {"max_size": -1}, "type": "object"},
            {"if": {"type": "null"}, "then": False},
            "true",
            "null",
            "",
            # Expressions within.
            {"type": "string", "pattern": "("},
            {"type": "string", "pattern": "(?=a)"},
            {"type": "string", "pattern": ".*" * 30_000},
            {"anyOf": [{"type": "string", "pattern": f"{n}" + ".*" * 250} for n in range(20)]},
            {"patternProperties": {".*" * 3_000: {"type": "null"}}},
            {"patternProperties": {f".*{n}.*": {} for n in range(20)}},
            {"type": "string", "format": "nonsense"},
        )
    ),
    *(
        {"regex": regex}
        for regex in (
            "[a&&b]x",
            "(",
            "(?!a)",
            r"(a)\1",
            r"\bword",
            "a{2,1}",
            "a{99999999999999}",
            r"\x{110000}",
            r"\p{Nonsense}",
            "(" * 2_000 + ")" * 2_000,
            ".*" * 32_000,
            "a?" * 32_000,
            "a?" * 2_000,
            "((a{100}){100}){100}",
            # Made at random: llguidance panics.
            r"((([a-z&&[^m]]){20,}|(\p{L}|(\p{L}|(é|a))))(.*\n\w((.|\n)){0}){0}|\n\x{10ffff}\w)",
        )
    ),
    {"choice": []},
    {"choice": ["a", ""]},
    {"choice": ["a" * 70_000]},
    {"choice": [f"a{n}" for n in range(9_000)]},
]
SERVED: list[dict[str, Schema]] = [
    *(
        {"json": schema}
        for schema in (
            {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False},
            {"type": "string", "minLength": 10**9},
            {"type": "array", "items": {"type": "null"}, "minItems": 10**9},
            {"type": "string", "pattern": "(a{1000}){10}"},
            {"enum": list(range(5_000))},
            multiples(100_000, 7, 0.01, 99_991),
            {"const": '"\\\0'},
        )
    ),
    *({"regex": regex} for regex in ("(a|aa)*b", "(.*a.{20}){20}", "(.*a?){9999}", "[^a]{60000}", "\0", "(a|b)*" * 90)),
    *({"choice": choice} for choice in (['"\\\n"'], ["/a/"], ["\0"], ["a", "a"], ["a" * 60_000], ["\U0001f600"])),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess("--num-gpu-blocks-override", "65", "--max-model-len", "1024") as engine:
        yield engine


@pytest.mark.slow
def test_no_grammar_ends_or_fills_the_engine(engine: EngineProcess) -> None:
    process = psutil.Process(engine.process.pid)
    before = process.memory_info().rss
    for expected, cases in ((400, REFUSED), (200, SERVED)):
        for case in cases:
            body = json.dumps({"prompt": "a", "max_tokens": 8, "structured_outputs": case})
            answer = httpx2.post(f"{engine.url}/v1/completions", content=body, timeout=PATIENCE_S)
            shown = f"{body[:200]}: {answer.text[:200]}"
            assert answer.status_code == expected, shown
            if expected == 400:
                error = answer.json()["error"]
                assert (error["param"], error["type"]) == ("structured_outputs", "invalid_request_error"), shown
                assert error["message"].startswith("structured_outputs: "), shown
    assert process.memory_info().rss - before < MAX_GROWTH
    assert "Traceback" not in engine.log()


@pytest.mark.usefixtures("real_parts")
def test_the_field_that_was_sent_is_named(engine: EngineProcess) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8, "response_format": schema}
    answer = httpx2.post(f"{engine.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "response_format")
    assert error["message"].startswith("response_format: json cannot be used: no token")
