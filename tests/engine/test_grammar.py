"""Grammars: what cannot be one is named, what is chosen under one fits it, and each is compiled once."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e .[engine]")

import torch
from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvscope.engine.models.tokens import ByteTokenizer, DirectoryTokenizer
from kvscope.engine.requests.request import Request, SamplingParams
from kvscope.engine.requests.structured_output import (
    COMPILED_GRAMMARS_KEPT,
    MAX_CHARACTERS,
    MAX_REGEX_CHARACTERS,
    Compiled,
    GrammarCompiler,
    Matcher,
    StructuredOutputs,
)
from tests.engine.process import wait_for
from tests.engine.steps import sample

VOCAB = ByteTokenizer.VOCAB_SIZE
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 300}, "maxItems": 3},
        "kind": {"enum": ["block", "table"]},
        "free": {"type": "boolean"},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
REGEX = r"[a-zé]{2,5}(-[0-9]{1,3})?: (free|held|größer)!"
NOTHING = "[a&&b]x"
"""A regular expression that is one, and that no text matches."""


def byte_tokenizer() -> LLTokenizer:
    return ByteTokenizer().for_grammars({ByteTokenizer.END})


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(byte_tokenizer, lambda: None)
    yield made
    made.close()


def compiled(compiler: GrammarCompiler, *wanted: StructuredOutputs) -> list[Compiled]:
    for number, one in enumerate(wanted):
        compiler.start(number, one)
    results: list[Compiled] = []

    def all_done() -> bool:
        results.extend(compiler.take())
        return len(results) == len(wanted)

    wait_for(all_done)
    assert [result.number for result in results] == list(range(len(wanted)))
    return results


def matcher(compiler: GrammarCompiler, **wanted: Any) -> Matcher:
    (result,) = compiled(compiler, StructuredOutputs(**wanted))
    assert result.matcher is not None, result.error
    return result.matcher


def make(matcher: Matcher, vocab: int, seed: int, temperature: float) -> list[int]:
    """The tokens of one output, from random logits."""
    draws = torch.Generator().manual_seed(seed)
    request = Request(1, "r", [1], SamplingParams(temperature=temperature, seed=seed))
    request.matcher = matcher
    while True:
        (one,) = sample(torch.randn((1, vocab), generator=draws) * 3, [request], seed)
        request.append(one.token_id)
        assert not one.error
        if one.ends:
            return request.output_token_ids


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({}, "exactly one of json"),
        ({"json": {}, "regex": "a"}, "exactly one of json"),
        ({"json": {"type": "thing"}}, "json cannot be used: Invalid type: thing"),
        ({"json": "{"}, "json cannot be used: Expecting property name"),
        ({"json": "[]"}, "json cannot be used"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "Unsatisfiable"),
        ({"regex": "a(b"}, "regex cannot be used: .*unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"choice": ("a" * (MAX_CHARACTERS + 1),)}, f"longer than the {MAX_CHARACTERS}"),
        ({"regex": "a" * (MAX_REGEX_CHARACTERS + 1)}, "characters of regular expressions, and may have 4,096"),
        ({"json": {"multipleOf": 9_999_991}}, "multipleOf are 9,999,991 together"),
        ({"json": {"const": -(1 << 63)}}, "the number -9.22337e"),
    ],
)
def test_what_is_no_grammar_says_why(wanted: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.compile(says, re.DOTALL)):
        StructuredOutputs(**wanted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_chosen_under_a_schema_fits_it(compiler: GrammarCompiler, temperature: float) -> None:
    made = []
    for seed in range(8):
        tokens = make(matcher(compiler, json=SCHEMA), VOCAB, seed, temperature)
        made.append(json.loads(bytes(token for token in tokens if token < ByteTokenizer.BEGIN)))
        jsonschema.validate(made[-1], SCHEMA)
    assert len({json.dumps(one) for one in made}) == len(made)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_chosen_under_a_regular_expression_matches_it(compiler: GrammarCompiler, temperature: float) -> None:
    for seed in range(8):
        tokens = make(matcher(compiler, regex=REGEX), VOCAB, seed, temperature)
        assert re.fullmatch(REGEX, bytes(tokens).decode())


def test_an_output_may_end_where_the_grammar_lets_it_and_must_at_its_end(compiler: GrammarCompiler) -> None:
    """By the token that ends outputs, which is allowed there alone; and without one where nothing may follow."""
    lengths = set()
    for seed in range(40):
        *made, last = make(matcher(compiler, regex="a{1,3}"), VOCAB, seed, 1.0)
        assert (last == ByteTokenizer.END) == (len(made) < 3) or (last, len(made)) == (ord("a"), 2)
        lengths.add(len(made) + (last != ByteTokenizer.END))
    assert lengths == {1, 2, 3}


def test_a_grammar_changes_nothing_for_those_who_share_the_step(compiler: GrammarCompiler) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, VOCAB)
    requests = [Request(n, "r", [1], SamplingParams(temperature=n % 2, seed=n, logprobs=2)) for n in range(4)]
    alone = sample(logits, requests, 0)
    requests[2].matcher = matcher(compiler, regex="[xyz]+")
    kept = logits.clone()
    shared = sample(logits, requests, 0)
    assert logits.equal(kept)
    assert [shared[row] for row in (0, 1, 3)] == [alone[row] for row in (0, 1, 3)]
    assert shared[2].token_id in b"xyz"
    # How likely it was is the model's own word.
    assert shared[2].logprobs[0].logprob == pytest.approx(logits[2].log_softmax(-1)[shared[2].token_id].item())
    assert shared[2].logprobs[1:] == alone[2].logprobs[1:]


def test_a_step_beyond_the_end_of_a_grammar_is_worth_nothing_and_harms_nobody(compiler: GrammarCompiler) -> None:
    done = matcher(compiler, regex="a")
    make(done, VOCAB, 0, 0.0)
    request = Request(1, "r", [1], SamplingParams())
    request.matcher = done
    (beyond,) = sample(torch.randn(1, VOCAB), [request], 0)
    assert not beyond.error


def test_equal_grammars_are_compiled_once_and_their_outputs_go_their_own_ways() -> None:
    threads: list[str] = []

    def made_known() -> LLTokenizer:
        threads.append(threading.current_thread().name)
        return byte_tokenizer()

    compiler = GrammarCompiler(made_known, lambda: None)
    try:
        same = [
            StructuredOutputs(json=SCHEMA),
            StructuredOutputs(json=json.dumps(SCHEMA)),
            StructuredOutputs(regex="a"),
        ]
        first, second, _ = (result.matcher for result in compiled(compiler, *same))
        assert compiler._compiled.cache_info()[:2] == (1, 2)
        assert first is not None
        assert second is not None
        before = second.mask
        make(first, VOCAB, 0, 0.0)
        assert second.mask == before
        make(second, VOCAB, 0, 0.0)
        compiled(compiler, *(StructuredOutputs(regex=f"a{{{n}}}") for n in range(1, COMPILED_GRAMMARS_KEPT + 10)))
        assert compiler._compiled.cache_info().currsize == COMPILED_GRAMMARS_KEPT
        assert len(threads) == 1
        assert threads[0].startswith("kvscope-grammar")
    finally:
        compiler.close()


def test_what_cannot_be_compiled_is_told_and_the_next_is_compiled(compiler: GrammarCompiler) -> None:
    nothing, something = compiled(compiler, StructuredOutputs(regex=NOTHING), StructuredOutputs(regex="a"))
    assert nothing.matcher is None
    assert "regex cannot be used: no token" in nothing.error
    assert something.matcher is not None


def in_directory(directory: Path, special: list[str]) -> DirectoryTokenizer:
    """A byte-level tokenizer such as most models have, trained on a few words."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(['{"name": "free", "kind": "block"} größer held: true, false'] * 3, trainer)
    made.save(str(directory / "tokenizer.json"))
    return DirectoryTokenizer(directory)


@pytest.mark.parametrize("special", [["<s>", "</s>"], []])
def test_a_model_s_own_tokens_are_allowed_by_their_bytes(tmp_path: Path, special: list[str]) -> None:
    """Also with rows that have no token, and if nothing ends an output but its grammar."""
    tokenizer = in_directory(tmp_path, special)
    eos = {special.index("</s>")} if special else set()
    compiler = GrammarCompiler(lambda: tokenizer.for_grammars(eos), lambda: None)
    try:
        used = set()
        for seed in range(8):
            tokens = make(matcher(compiler, json=SCHEMA), 320, seed, seed % 2)
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), SCHEMA)
            used.update(tokens)
            tokens = make(matcher(compiler, regex=REGEX), 320, seed, seed % 2)
            assert re.fullmatch(REGEX, tokenizer.decode(tokens))
        assert any(len(tokenizer.decode([token])) > 2 for token in used)
    finally:
        compiler.close()


def test_a_tokenizer_that_does_not_tell_its_bytes_is_named(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"w0": 0, "w1": 1}, unk_token="w0"))
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = DirectoryTokenizer(tmp_path)
    compiler = GrammarCompiler(lambda: tokenizer.for_grammars({1}), lambda: None)
    try:
        (result,) = compiled(compiler, StructuredOutputs(regex="a"))
        assert f"the tokenizer of {tmp_path.name} does not expose the bytes" in result.error
    finally:
        compiler.close()


def test_an_output_that_no_token_can_go_on_with_ends_with_that() -> None:
    """Where a vocabulary lacks the bytes."""

    class NoC:
        bos_token_id, eos_token_id, special_token_ids, tokens = None, 2, (2,), (b"a", b"b", b"</s>")

        def __call__(self, text: bytes) -> list[int]:
            return [self.tokens.index(bytes([byte])) for byte in text if byte in b"ab"]

    compiler = GrammarCompiler(lambda: LLTokenizer(TokenizerWrapper(NoC())), lambda: None)
    try:
        request = Request(1, "r", [1], SamplingParams())
        request.matcher = matcher(compiler, regex="abc")
        first, second = (sample(torch.zeros(1, 3), [request], 0)[0] for _ in range(2))
        assert (first.token_id, first.error) == (0, "")
        assert second.token_id == 1
        assert "no token leads to an output" in second.error
    finally:
        compiler.close()
