"""Offline use: texts in the order of the prompts, ended where they should be."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvscope.engine.core.intake import Refused
from kvscope.engine.models.tokens import ByteTokenizer
from kvscope.engine.requests.request import SamplingParams
from kvscope.engine.serving.llm import LLM
from kvscope.engine.serving.text_stream import TextStream
from kvscope.monitor.contract.kinds import Status
from tests.engine import checkpoints

ROOT = Path(__file__).parent.parent.parent
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(num_gpu_blocks_override=33, block_size=4) as llm:
        yield llm


def test_outputs_come_in_the_order_of_the_prompts_however_they_are_given(llm: LLM) -> None:
    texts = ["a", "something longer than that", "bb"]
    together = llm.generate(texts, GREEDY)
    assert [output.prompt for output in together] == texts
    tokenizer = llm.core.loaded.tokenizer
    ids = [tokenizer.encode(text) for text in texts]
    assert [output.prompt_token_ids for output in together] == ids
    by_ids = llm.generate(ids, GREEDY)
    one_by_one = [llm.generate(text, GREEDY)[0] for text in texts] + [llm.generate(ids[0], GREEDY)[0]]
    expected = [output.outputs for output in together]
    assert [output.outputs for output in by_ids] == expected
    assert [output.outputs for output in one_by_one] == [*expected, expected[0]]
    assert all(len(output.outputs[0].token_ids) == 16 for output in together)
    assert all(tokenizer.decode(o.outputs[0].token_ids) == o.outputs[0].text for o in together)
    assert len({output.request_id for output in together + by_ids}) == 6
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_params_and_a_seed_repeats(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in (3, 7)]
    first, second = (llm.generate(["one", "two"], params) for _ in range(2))
    assert [len(output.outputs[0].token_ids) for output in first] == [3, 7]
    assert [o.outputs for o in first] == [o.outputs for o in second]
    with pytest.raises(ValueError, match="2 prompts and 1 sampling params"):
        llm.generate(["one", "two"], params[:1])


def test_several_outputs_of_one_prompt_are_those_of_the_seeds_that_follow(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, seed=3, n=3, ignore_eos=True)
    several, other = llm.generate(["one", "two"], [params, GREEDY])
    assert [output.index for output in several.outputs] == [0, 1, 2]
    alone = [llm.generate("one", SamplingParams(max_tokens=6, seed=s, ignore_eos=True))[0] for s in (3, 4, 5)]
    assert [output.token_ids for output in several.outputs] == [one.outputs[0].token_ids for one in alone]
    assert other.outputs == llm.generate("two", GREEDY)[0].outputs


def test_logprobs_are_told_at_each_place_if_asked_for(llm: LLM) -> None:
    (reported,) = llm.generate("one", SamplingParams(max_tokens=6, seed=3, logprobs=2, ignore_eos=True))
    made = reported.outputs[0]
    assert made.logprobs is not None
    for token, at in zip(made.token_ids, made.logprobs, strict=True):
        assert sorted(one.rank for one in at.values())[:2] == [1, 2]
        assert len(at) == (2 if at[token].rank <= 2 else 3)
        assert all(key == one.token_id for key, one in at.items())
    assert llm.generate("one", GREEDY)[0].outputs[0].logprobs is None


def test_a_stop_string_ends_the_text_before_it_and_frees_the_request(llm: LLM) -> None:
    (whole,) = llm.generate("stop me", GREEDY)
    text = whole.outputs[0].text
    stop = text[5:7]
    end = text.index(stop)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, stop=[stop, "never this"])
    (stopped,) = llm.generate("stop me", params)
    assert stopped.outputs[0].text == text[:end]
    assert stopped.outputs[0].finish_reason == "stop"
    assert len(stopped.outputs[0].token_ids) < 16
    assert llm.core.pool.counts()[2] == 0
    assert llm.core.in_flight == 0
    assert llm.generate("stop me", GREEDY)[0].outputs == whole.outputs


def test_a_prompt_that_can_never_fit_is_told_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(Refused, match="200 tokens and needs 50 KV blocks"):
        llm.generate([[7] * 200, [7] * 3], GREEDY)
    assert llm.core.in_flight == 0
    assert llm.core.pool.counts()[2] == 0
    assert llm.generate([7] * 3, GREEDY)[0].outputs[0].finish_reason == "length"


def test_a_setting_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match="no setting blok_size; there are model"):
        LLM(blok_size=3)


@pytest.mark.slow
def test_a_program_written_for_vllm_runs_but_for_its_import_and_the_models_place(tmp_path: Path) -> None:
    checkpoints.save("gpt2", tmp_path / "gpt2")
    (tmp_path / "program.py").write_text(
        """\
from kvscope.engine.serving.llm import LLM, SamplingParams
# Sample prompts on which to generate.
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
# Set sampling parameters for generation.
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=50)
# Create an LLM instance.
# By default, vLLM will try to use as much GPU memory as possible for the KV cache.
llm = LLM(model="gpt2")
# Generate text.
outputs = llm.generate(prompts, sampling_params)
# Print the outputs.
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""
    )
    made = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (made.returncode, made.stderr) == (0, "")
    lines = made.stdout.splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("Prompt: 'The capital of France is', Generated text: 'w")
    assert all(len(line.partition("Generated text: ")[2].split()) == 50 for line in lines)


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_text_comes_in_whole_characters_and_adds_up(pieces: int) -> None:
    tokenizer = ByteTokenizer()
    text = "naïve — 今日は 🙂 end"
    ids = list(text.encode())
    stream = TextStream(tokenizer)
    deltas = [
        stream.add(ids[i : i + pieces], Status.FINISHED_LENGTH_CAPPED if i + pieces >= len(ids) else None)
        for i in range(0, len(ids), pieces)
    ]
    assert "".join(deltas) == stream.text == text
    assert all("\ufffd" not in delta for delta in deltas)


def test_bytes_that_never_become_a_character_come_out_in_the_end() -> None:
    stream = TextStream(ByteTokenizer())
    assert stream.add([0xE4]) == ""
    assert stream.add([0xBB], Status.FINISHED_LENGTH_CAPPED) == "\ufffd"


def test_stop_strings_count_beyond_min_tokens_and_may_be_kept() -> None:
    def text_of(**params: Any) -> tuple[str, str | int | None]:
        stream = TextStream(ByteTokenizer(), SamplingParams(max_tokens=99, **params))
        for token in b"one, two, three":
            stream.add([token])
            if stream.stopped:
                break
        return stream.text, stream.stop_reason

    assert text_of(stop=[", "]) == ("one", ", ")
    assert text_of(stop=[", "], include_stop_str_in_output=True) == ("one, ", ", ")
    assert text_of(stop=[", "], min_tokens=5) == ("one, two", ", ")
    assert text_of(stop=["three", "two"]) == ("one, ", "two")
    assert text_of(stop=["four"], min_tokens=5) == ("one, two, three", None)


def test_a_stop_token_is_the_reason_and_no_part_of_the_text() -> None:
    for include, text in ((False, "a"), (True, "a!")):
        params = SamplingParams(stop_token_ids=frozenset(b"!"), include_stop_str_in_output=include)
        stream = TextStream(ByteTokenizer(), params)
        stream.add(list(b"a"))
        stream.add(list(b"!"), Status.FINISHED_STOPPED)
        assert (stream.text, stream.stop_reason, len(stream.token_ids)) == (text, ord("!"), 2)
    ended = TextStream(ByteTokenizer(), SamplingParams(stop_token_ids=frozenset(b"!")))
    ended.add(list(b"a!"), Status.FINISHED_LENGTH_CAPPED)  # the length ended it, not the token
    assert (ended.text, ended.stop_reason) == ("a!", None)


def test_a_stop_string_is_found_wherever_the_tokens_cut_it_and_none_of_it_leaks() -> None:
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice("ab€") for _ in range(rng.randint(1, 30)))
        stops = ["".join(rng.choice("ab€") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(0, 2))]
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        ids = list(text.encode())
        stream = TextStream(ByteTokenizer(), SamplingParams(stop=stops))
        deltas = []
        for index, token in enumerate(ids):
            deltas.append(stream.add([token], Status.FINISHED_LENGTH_CAPPED if index == len(ids) - 1 else None))
            if stream.stopped:
                break
        # The stop string that is complete first ends the text; of those complete at once, the longest.
        first = min(ends, default=None)
        expected = text if first is None else text[: min(first - len(s) for s in stops if text[:first].endswith(s))]
        assert stream.stopped == (first is not None)
        assert "".join(deltas) == stream.text == expected
