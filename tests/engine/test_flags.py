"""The engine's command line takes vLLM's flags by vLLM's names, and says what is near one that there is not."""

from __future__ import annotations

import argparse

import pytest

from kvscope.engine.command_line import config_of, engine_parser, parse_size


def test_the_flags_of_a_vllm_command_line_are_taken() -> None:
    line = (
        "serve some/model --served-model-name default_model --max-num-batched-tokens=64K --max-num-seqs 128"
        " --no-enable-prefix-caching --port 8001 --host :: --kv-cache-memory=151519866880 --block-size 32"
        " --num-gpu-blocks-override 513 --max-model-len 262k"
    )
    parsed = engine_parser().parse_args(line.split())
    config = config_of(parsed)
    assert (parsed.host, parsed.port) == ("::", 8001)
    assert (config.model, config.served_model_name) == ("some/model", "default_model")
    assert config.max_num_batched_tokens == 64 * 1024
    assert config.max_model_len == 262 * 1000
    assert (config.max_num_seqs, config.block_size, config.num_gpu_blocks_override) == (128, 32, 513)
    assert config.kv_cache_memory_bytes == 151519866880
    assert not config.enable_prefix_caching


@pytest.mark.parametrize(("arguments", "model"), [([], "tiny"), (["a/b"], "a/b"), (["--model", "a/b"], "a/b")])
def test_the_model_is_a_word_of_its_own_or_a_flag(arguments: list[str], model: str) -> None:
    assert config_of(engine_parser().parse_args(["serve", *arguments])).model == model


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("65536", 65536),
        ("64K", 65536),
        ("64k", 64000),
        ("25.6k", 25600),
        ("1m", 1000**2),
        ("1M", 1024**2),
        ("2g", 2 * 1000**3),
        ("2G", 2 * 1024**3),
        ("1t", 1000**4),
        ("1T", 1024**4),
    ],
)
def test_a_size_is_read_as_vllm_reads_it(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5K", "1.5", "1.00001k", "64 K", "64KB", "1e3", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"not a size|not whole"):
        parse_size(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("tiny --max-num-seq 3", "there is no --max-num-seq: did you mean --max-num-seqs"),
        ("tiny --max_num_seqs=3", "there is no --max_num_seqs: did you mean --max-num-seqs"),
        ("tiny --num-gpu-blocks 3", "there is no --num-gpu-blocks: did you mean --num-gpu-blocks-override"),
        ("tiny --reasoning-parser qwen3 --language-model-only", "there is no --reasoning-parser; there is no --lang"),
        ("tiny --model other", "not allowed with"),
        ("tiny --max-model-len 1.5K", "not whole"),
    ],
)
def test_a_flag_that_there_is_not_is_named_with_those_near_it(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        engine_parser().parse_args(["serve", *arguments.split()])
    assert left.value.code == 2
    assert says in capsys.readouterr().err
