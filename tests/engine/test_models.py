"""Checkpoints as transformers saves them: the same logits, and clear words about what cannot be loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e .[engine]")
pytest.importorskip("transformers", reason="needs transformers: pip install -e .[dev]")

from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.models import LoadedModel, load, tiny
from engine.models.tokens import ByteTokenizer, DirectoryTokenizer
from engine.sampling import SamplingParams
from tests.engine import checkpoints


def greedy(loaded: LoadedModel, prompt: list[int], max_tokens: int) -> list[int]:
    core = EngineCore(EngineConfig(), loaded)
    core.submit("r", prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
    tokens: list[int] = []
    while core.in_flight:
        tokens += [token for output in core.step() for token in output.token_ids]
    core.close()
    return tokens


def edit(path: Path, **changes: Any) -> None:
    """Change settings of a config.json; None takes one out."""
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def refusal(directory: Path, **settings: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the caller looks at what it says
        load(EngineConfig(model=str(directory), **settings))
    return str(caught.value)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    checkpoints.save("llama", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", checkpoints.CONFIGS)
def test_every_family_says_what_generate_says(name: str, tmp_path: Path) -> None:
    model = checkpoints.save(name, tmp_path)
    loaded = load(EngineConfig(model=str(tmp_path)))
    for prompt in checkpoints.prompts(4, 200, seed=3):
        assert greedy(loaded, prompt, 24) == checkpoints.generate(model, prompt, 24)
    assert loaded.weight_bytes == sum(weight.nbytes for weight in model.parameters())


def test_an_end_token_ends_the_output(tmp_path: Path) -> None:
    model = checkpoints.save("qwen2", tmp_path)
    prompt = checkpoints.prompts(2, 40, seed=5)[1]
    said = checkpoints.generate(model, prompt, 24)
    # What generation_config.json says goes before config.json, as in `generate`.
    ends = [said[5], said[9]]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    first = min(map(said.index, ends))
    assert greedy(load(EngineConfig(model=str(tmp_path))), prompt, 24) == said[: first + 1]


def test_sharded_weights_are_found_by_their_index(tmp_path: Path) -> None:
    model = checkpoints.save("llama", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    prompt = checkpoints.prompts(2, 40, seed=5)[1]
    assert greedy(load(EngineConfig(model=str(tmp_path))), prompt, 8) == checkpoints.generate(model, prompt, 8)
    first = min(tmp_path.glob("model-*.safetensors"))
    first.unlink()
    assert first.name in refusal(tmp_path)


def test_gpt2_weights_without_the_outer_name_load_too(tmp_path: Path) -> None:
    model = checkpoints.save("gpt2", tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}, path)
    prompt = checkpoints.prompts(2, 40, seed=5)[1]
    assert greedy(load(EngineConfig(model=str(tmp_path))), prompt, 8) == checkpoints.generate(model, prompt, 8)


def test_configs_of_older_releases_are_read(tmp_path: Path) -> None:
    model = checkpoints.save("llama-linear", tmp_path)
    parameters = dict(model.config.rope_parameters)
    edit(
        tmp_path / "config.json", rope_parameters=None, rope_theta=parameters["rope_theta"],
        rope_scaling={"type": "linear", "factor": parameters["factor"]},
    )  # fmt: skip
    prompt = checkpoints.prompts(2, 200, seed=5)[1]
    assert greedy(load(EngineConfig(model=str(tmp_path))), prompt, 16) == checkpoints.generate(model, prompt, 16)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM", "GPT2LMHeadModel"]),
        ({"architectures": None}, ["none named"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["yarn", "llama3"]),
        ({"hidden_act": "relu"}, ["hidden_act", "relu", "silu"]),
        ({"sliding_window": 64}, ["sliding_window", "64"]),
        ({"num_hidden_layers": None}, ["config.json", "num_hidden_layers"]),
        ({"num_hidden_layers": 3}, ["lack", "model.layers.2"]),
        ({"hidden_size": 128}, ["model.embed_tokens.weight", "128"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantised"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(llama: Path, changes: dict[str, Any], named: list[str]) -> None:
    edit(llama / "config.json", **changes)
    said = refusal(llama)
    assert all(name in said for name in named), said


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(llama: Path, missing: str) -> None:
    (llama / missing).unlink()
    assert missing in refusal(llama)


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_broken_file_is_named(llama: Path, broken: str) -> None:
    (llama / broken).write_text("?")
    assert broken in refusal(llama)


def test_a_directory_that_is_none_and_a_context_that_is_too_long_are_refused(llama: Path) -> None:
    assert "no directory" in refusal(llama / "nowhere")
    longer = checkpoints.MAX_LEN + 1
    said = refusal(llama, max_model_len=longer)
    assert str(longer) in said
    assert str(checkpoints.MAX_LEN) in said
    assert load(EngineConfig(model=str(llama), max_model_len=100)).config.max_model_len == 100


def test_the_tiny_model_is_the_same_from_the_same_seed_and_can_be_read() -> None:
    same, again, other = (load(EngineConfig(seed=seed)) for seed in (1, 1, 2))
    prompt = same.tokenizer.encode("The blocks of")
    said = greedy(same, prompt, 40)
    assert said == greedy(again, prompt, 40)
    assert said != greedy(other, prompt, 40)
    assert same.tokenizer.decode(said).isprintable()
    assert len(set(said)) > 10
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
