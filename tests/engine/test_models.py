"""Checkpoints as transformers saves them: the same logits, and clear words about what cannot be loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e .[engine]")

import torch
from safetensors.torch import load_file, save_file

from kvscope.engine.config import EngineConfig
from kvscope.engine.core.engine_core import EngineCore
from kvscope.engine.execution.model_runner import ModelRunner
from kvscope.engine.models import LoadedModel, load_model, tiny
from kvscope.engine.models.tokens import ByteTokenizer, DirectoryTokenizer
from kvscope.engine.requests.request import Request, Sampled, SamplingParams
from tests.engine import checkpoints
from tests.engine.steps import execute, plan

FIRST = ("gpt2", "llama")
"""Of the two kinds of positions; those of the other families are tried with the slow tests."""
NEAR = 1e-5
"""The distance of logits in fp32 that rounding in another order can explain."""


def greedy(loaded: LoadedModel, prompt: list[int], max_tokens: int) -> list[int]:
    core = EngineCore(EngineConfig(), loaded)
    core.submit("r", prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
    tokens: list[int] = []
    while core.in_flight:
        tokens += [token for output in core.step() for token in output.token_ids]
    core.close()
    return tokens


def refusal(directory: Path, **settings: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the caller looks at what it says
        load_model(EngineConfig(model=str(directory), **settings))
    return str(caught.value)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    checkpoints.save("llama", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in checkpoints.CONFIGS],
)
def test_every_family_says_what_generate_says(name: str, tmp_path: Path) -> None:
    model = checkpoints.save(name, tmp_path)
    loaded = load_model(EngineConfig(model=str(tmp_path)))
    for prompt in checkpoints.prompts(4, 200, seed=3):
        assert greedy(loaded, prompt, 24) == checkpoints.generate(model, prompt, 24)
    assert loaded.weight_bytes == sum(weight.nbytes for weight in model.parameters())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", checkpoints.CONFIGS)
def test_in_16_bits_logits_are_as_near_as_their_rounding(name: str, dtype: str, tmp_path: Path) -> None:
    checkpoints.save(name, tmp_path)
    bits: torch.dtype = getattr(torch, dtype)
    prompt = checkpoints.prompts(2, 300, seed=3)[1]
    exact = checkpoints.logits(tmp_path, prompt, torch.float32)
    theirs = checkpoints.logits(tmp_path, prompt, bits)
    loaded = load_model(EngineConfig(model=str(tmp_path), dtype=dtype))
    assert {weight.dtype for weight in loaded.module.weights()} == {bits}
    ours = checkpoints.engine_logits(loaded, prompt, bits)
    # Both are as far from fp32 as rounding takes them; two such errors are at most twice as far from one another.
    rounding = checkpoints.distance(theirs, exact)
    assert 0 < checkpoints.distance(ours, exact) < 1.5 * rounding
    assert checkpoints.distance(ours, theirs) < 2 * rounding


def test_blocks_that_a_window_has_left_behind_are_not_read(tmp_path: Path) -> None:
    checkpoints.save("mistral", tmp_path)
    loaded = load_model(EngineConfig(model=str(tmp_path)))
    window = loaded.config.sliding_window
    assert window
    assert loaded.config.sliding_layers == set(range(loaded.config.num_layers))
    block_size = 4
    prompt = checkpoints.prompts(2, 3 * window, seed=3)[1]
    table = list(range(1, 1 + -(-len(prompt) // block_size)))
    plain = ModelRunner(loaded, 1 + len(table), block_size, "cpu", "float32")
    poisoned = ModelRunner(loaded, 1 + len(table), block_size, "cpu", "float32")

    def says(run: ModelRunner, start: int, end: int) -> list[Sampled]:
        request = Request(1, "r", prompt[:end], SamplingParams(temperature=0))
        request.num_computed_tokens = start
        return execute(run, plan((request, end - start)), {1: table})

    first = len(prompt) - 10
    assert says(plain, 0, first) == says(poisoned, 0, first)
    # A chunk, and then a token after the other: each sees the last of the window, and no block before those.
    for start, end in [(first, first + 5), *((at, at + 1) for at in range(first + 5, len(prompt)))]:
        behind = table[: (start + 1 - window) // block_size]
        assert behind
        poisoned.scatter(behind, torch.full_like(poisoned.gather(behind), torch.nan))
        assert says(plain, start, end) == says(poisoned, start, end)


@pytest.mark.parametrize("name", ["mistral", "qwen2-window", "qwen3-window"])
def test_a_window_one_token_longer_or_shorter_is_not_the_same(name: str, tmp_path: Path) -> None:
    """The comparisons with transformers would see it; and a window as long as the prompt is none."""
    checkpoints.save(name, tmp_path)
    prompt = checkpoints.prompts(2, 100, seed=3)[1]
    window = checkpoints.CONFIGS[name].settings["sliding_window"]
    stated = checkpoints.logits(tmp_path, prompt, torch.float32)
    for sliding_window in (window - 1, window, window + 1, len(prompt)):
        checkpoints.edit(tmp_path, sliding_window=sliding_window)
        loaded = load_model(EngineConfig(model=str(tmp_path)))
        same = checkpoints.distance(checkpoints.engine_logits(loaded, prompt, torch.float32), stated) < NEAR
        assert same == (sliding_window == window)


def test_an_end_token_ends_the_output(tmp_path: Path) -> None:
    model = checkpoints.save("qwen2", tmp_path)
    prompt = checkpoints.prompts(2, 40, seed=5)[1]
    stated = checkpoints.generate(model, prompt, 24)
    # What generation_config.json says goes before config.json, as in `generate`.
    ends = [stated[5], stated[9]]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    first = min(map(stated.index, ends))
    assert greedy(load_model(EngineConfig(model=str(tmp_path))), prompt, 24) == stated[: first + 1]


def test_sharded_weights_are_found_by_their_index(tmp_path: Path) -> None:
    model = checkpoints.save("llama", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    prompt = checkpoints.prompts(2, 40, seed=5)[1]
    assert greedy(load_model(EngineConfig(model=str(tmp_path))), prompt, 8) == checkpoints.generate(model, prompt, 8)
    first = min(tmp_path.glob("model-*.safetensors"))
    first.unlink()
    assert first.name in refusal(tmp_path)


def test_gpt2_weights_without_the_outer_name_load_too(tmp_path: Path) -> None:
    model = checkpoints.save("gpt2", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    # They had the causal mask among the weights, too.
    mask = torch.ones(checkpoints.MAX_LEN, checkpoints.MAX_LEN).tril()[None, None]
    save_file({**tensors, "h.0.attn.bias": mask, "h.0.attn.masked_bias": torch.tensor(-1e4)}, path)
    prompt = checkpoints.prompts(2, 40, seed=5)[1]
    assert greedy(load_model(EngineConfig(model=str(tmp_path))), prompt, 8) == checkpoints.generate(model, prompt, 8)


OLDER = {"rope_parameters": None, "rope_theta": 10_000.0, "dtype": None, "torch_dtype": "bfloat16"}
"""How releases before the fifth wrote what is now in other places; None takes a setting out."""


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {"n_ctx": 512, "n_inner": None, "task_specific_params": {"text-generation": {"do_sample": True}}}),
        ("llama", {**OLDER, "pretraining_tp": 1, "is_llama_config": True, "rope_interleaved": False, "head_dim": None}),
        ("llama-linear", {**OLDER, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("mistral", {**OLDER, "head_dim": None}),
        ("qwen2", {**OLDER, "layer_types": None, "sliding_window": 64, "max_window_layers": 1, "use_mrope": False}),
        ("qwen2-window", {**OLDER, "layer_types": None}),
        ("qwen3", {**OLDER, "layer_types": None, "max_window_layers": 1}),
    ],
)
def test_configs_as_older_releases_wrote_them_are_read(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    checkpoints.save(name, tmp_path)
    checkpoints.edit(tmp_path, **changes)
    prompt = checkpoints.prompts(2, 200, seed=5)[1]
    ours = checkpoints.engine_logits(load_model(EngineConfig(model=str(tmp_path))), prompt, torch.float32)
    assert checkpoints.distance(ours, checkpoints.logits(tmp_path, prompt, torch.float32)) < NEAR


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM", "GPT2LMHeadModel"]),
        ({"architectures": None}, ["none named"]),
        *(
            ({"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}}, [kind, "llama3"])
            for kind in ("yarn", "dynamic", "longrope")
        ),
        ({"hidden_act": "relu"}, ["hidden_act", "relu", "silu"]),
        ({"sliding_window": 64}, ["sliding_window", "64"]),
        ({"num_hidden_layers": None}, ["config.json", "num_hidden_layers"]),
        ({"num_hidden_layers": 3}, ["lack", "model.layers.2"]),
        ({"hidden_size": 128}, ["model.embed_tokens.weight", "128"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantised"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(llama: Path, changes: dict[str, Any], named: list[str]) -> None:
    checkpoints.edit(llama, **changes)
    stated = refusal(llama)
    assert all(name in stated for name in named), stated


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("gpt2", {"reorder_and_upcast_attn": True}, ["reorder_and_upcast_attn"]),
        ("gpt2", {"n_head": 5}, ["n_embd", "5"]),
        ("gpt2", {"rope_theta": 1e4}, ["rope_theta", "10000.0", "GPT2LMHeadModel"]),
        ("llama", {"use_rope": False}, ["use_rope", "False", "LlamaForCausalLM"]),
        ("llama", {"model_type": "mistral"}, ["model_type", "mistral", "llama"]),
        ("llama", {"num_attention_heads": 8, "head_dim": 8, "num_key_value_heads": 5}, ["8 query heads", "5"]),
        ("llama", {"attention_bias": True}, ["lack", "self_attn.q_proj.bias"]),
        ("llama3-tied", {"attention_bias": False}, ["model.layers.0.self_attn.", "bias", "no use"]),
        ("llama", {"tie_word_embeddings": True}, ["tie_word_embeddings", "lm_head.weight"]),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 2, 2]}}, ["mrope_section"]),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, ["linear", "needs factor"]),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ("mistral-full", {"layer_types": ["sliding_attention"]}, ["layer_types"]),
        ("mistral", {"sliding_window": 0}, ["sliding_window", "0", "at least 1"]),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "use_sliding_window"]),
        ("qwen2", {"use_mrope": True}, ["use_mrope"]),
        ("qwen3", {"layer_types": ["full_attention"]}, ["layer_types", "2 layers"]),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, ["layer_types", "chunked_attention"]),
        ("qwen3", {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, ["lack", "q_proj.bias"]),
    ],
)
def test_what_would_change_the_tokens_is_refused_by_name(
    name: str, changes: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    checkpoints.save(name, tmp_path)
    checkpoints.edit(tmp_path, **changes)
    stated = refusal(tmp_path)
    assert all(word in stated for word in named), stated


MORE_SETTINGS = {
    "attention_bias": True,
    "head_dim": 8,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "max_window_layers": 1,
    "num_key_value_heads": 1,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "rope_theta": 99.0,
    "sliding_window": 20,
    "use_sliding_window": True,
}
"""What one family or another reads, to be added where it is not."""


def changed(name: str, value: Any) -> Any:
    """Another value of the same kind; for null, one that the setting may have."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value * 2 + 1
        case str():
            return f"{value}x"
        case list():
            return [*value[1:], "full_attention"]
        case dict():
            return {**value, "rope_theta": 77.0}
    return MORE_SETTINGS.get(name, 1)


def variants(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The config with each setting changed, taken out or null, and with each that it may have besides."""
    for name, value in config.items():
        yield {**config, name: changed(name, value)}
        yield {**config, name: None}
        yield {other: config[other] for other in config if other != name}
    for name in MORE_SETTINGS.keys() - config.keys():
        yield {**config, name: MORE_SETTINGS[name]}


@pytest.mark.slow
@pytest.mark.parametrize("name", checkpoints.CONFIGS)
def test_whatever_setting_is_changed_logits_are_those_of_transformers_or_it_is_refused(
    name: str, tmp_path: Path
) -> None:
    checkpoints.save(name, tmp_path)
    path = tmp_path / "config.json"
    prompt = checkpoints.prompts(2, 100, seed=3)[1]
    compared = refused = 0
    for config in variants(json.loads(path.read_text())):
        path.write_text(json.dumps(config))
        try:
            loaded = load_model(EngineConfig(model=str(tmp_path)))
        except ValueError:
            refused += 1
            continue
        ours = checkpoints.engine_logits(loaded, prompt, torch.float32)
        try:
            theirs = checkpoints.logits(tmp_path, prompt, torch.float32)
        except Exception:  # transformers checks more than what it computes with, and says so in many ways
            continue
        assert checkpoints.distance(ours, theirs) < NEAR, config
        compared += 1
    assert compared
    assert refused


def test_weights_besides_those_that_the_model_uses_are_refused_unless_they_are_the_same(tmp_path: Path) -> None:
    checkpoints.save("qwen3", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tied, path)
    assert load_model(EngineConfig(model=str(tmp_path))).weight_bytes == sum(
        tensor.nbytes for tensor in tensors.values()
    )

    tied["lm_head.weight"][0, 0] += 1
    save_file(tied, path)
    assert "lm_head.weight" in refusal(tmp_path)

    lora = "model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({**tensors, lora: torch.zeros(2, 2)}, path)
    assert lora in refusal(tmp_path)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(llama: Path, missing: str) -> None:
    (llama / missing).unlink()
    assert missing in refusal(llama)


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_broken_file_is_named(llama: Path, broken: str) -> None:
    (llama / broken).write_text("?")
    assert broken in refusal(llama)


def test_a_directory_that_is_none_and_a_context_that_is_too_long_are_refused(llama: Path) -> None:
    assert "not a directory" in refusal(llama / "nowhere")
    longer = checkpoints.MAX_LEN + 1
    stated = refusal(llama, max_model_len=longer)
    assert str(longer) in stated
    assert str(checkpoints.MAX_LEN) in stated
    assert load_model(EngineConfig(model=str(llama), max_model_len=100)).config.max_model_len == 100


def test_the_tiny_model_is_the_same_from_the_same_seed_and_can_be_read() -> None:
    same, again, other = (load_model(EngineConfig(seed=seed)) for seed in (1, 1, 2))
    prompt = same.tokenizer.encode("The blocks of")
    stated = greedy(same, prompt, 40)
    assert stated == greedy(again, prompt, 40)
    assert stated != greedy(other, prompt, 40)
    assert same.tokenizer.decode(stated).isprintable()
    assert len(set(stated)) > 10
    for name, weight in tiny.weights(1).items():
        assert weight.isfinite().all(), name


def test_the_byte_tokenizer_gives_back_what_it_took() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve → 日本\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("")
    assert tokenizer.decode(tokenizer.encode("é")[:-1]) == "\N{REPLACEMENT CHARACTER}"
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(chat) == "user: hiassistant: "
    assert max(chat) < tokenizer.VOCAB_SIZE


def test_a_directorys_tokenizer_and_its_chat_template(llama: Path) -> None:
    tokenizer = DirectoryTokenizer(llama)
    assert tokenizer.encode("w7 w9") == [7, 9]
    assert tokenizer.decode([7, 9]) == "w7 w9"
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "w5"}])

    template = (
        "{% if messages[0].role == 'x' %}{{ raise_exception('no x') }}{% endif %}{{ bos_token }}"
        "{% for m in messages %} {{ m.content }}{% endfor %}{% if add_generation_prompt %} w2{% endif %}"
    )
    config = {"chat_template": template, "bos_token": {"content": "w1"}}
    (llama / "tokenizer_config.json").write_text(json.dumps(config))
    assert DirectoryTokenizer(llama).encode_chat([{"role": "user", "content": "w5 w6"}]) == [1, 5, 6, 2]
    with pytest.raises(ValueError, match="no x"):
        DirectoryTokenizer(llama).encode_chat([{"role": "x", "content": "w5"}])

    # A file of its own goes before the setting.
    (llama / "chat_template.jinja").write_text("w3")
    assert DirectoryTokenizer(llama).encode_chat([{"role": "user", "content": "w5"}]) == [3]
    (llama / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="chat template"):
        DirectoryTokenizer(llama)


def test_a_template_cannot_reach_out_of_its_sandbox(llama: Path) -> None:
    (llama / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}{{ messages.clear() }}")
    with pytest.raises(ValueError, match="refuses"):
        DirectoryTokenizer(llama).encode_chat([{"role": "user", "content": "w5"}])
