"""Random checkpoints, made and saved by transformers, and what `generate` says with them: the oracle."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from kvscope.engine.execution.attention import BatchAttention, PagedKV
from kvscope.engine.execution.input_batch import StepLayout
from kvscope.engine.models import LoadedModel
from kvscope.engine.requests.request import Request, SamplingParams
from tests.engine.steps import plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE = 320
MAX_LEN = 512

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")


class CheckpointConfig(NamedTuple):
    """The name of a configuration class of transformers, and the settings of a random model."""

    kind: str
    settings: dict[str, Any]


# Outputs have no end but their length, so that every one of them is long enough to be preempted.
CONFIGS = {
    "gpt2": CheckpointConfig(
        "GPT2Config",
        {
            "vocab_size": VOCAB_SIZE,
            "n_positions": MAX_LEN,
            "n_embd": 48,
            "n_layer": 2,
            "n_head": 3,
            "bos_token_id": 0,
            "eos_token_id": None,
        },
    ),
    "llama": CheckpointConfig(
        "LlamaConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_LEN,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "bos_token_id": 0,
            "eos_token_id": None,
        },
    ),
    "llama3-tied": CheckpointConfig(
        "LlamaConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_LEN,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "bos_token_id": 0,
            "eos_token_id": None,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-linear": CheckpointConfig(
        "LlamaConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_LEN,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "bos_token_id": 0,
            "eos_token_id": None,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
        },
    ),
    "mistral": CheckpointConfig(
        "MistralConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_LEN,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 37,
            "bos_token_id": 0,
            "eos_token_id": None,
        },
    ),
    "mistral-full": CheckpointConfig(
        "MistralConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_LEN,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "sliding_window": None,
            "bos_token_id": 0,
            "eos_token_id": None,
        },
    ),
    "qwen2": CheckpointConfig(
        "Qwen2Config",
        {
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_LEN,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "bos_token_id": 0,
            "eos_token_id": None,
        },
    ),
    "qwen2-window": CheckpointConfig(
        "Qwen2Config",
        {
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_LEN,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 2,
            "bos_token_id": 0,
            "eos_token_id": None,
        },
    ),
    "qwen3": CheckpointConfig(
        "Qwen3Config",
        {
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_LEN,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 20,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": None,
        },
    ),
    "qwen3-window": CheckpointConfig(
        "Qwen3Config",
        {
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_LEN,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "bos_token_id": 0,
            "eos_token_id": None,
        },
    ),
}


def imported_transformers() -> Any:
    """Import transformers in the test that needs it: that takes longer than collecting all tests does."""
    return pytest.importorskip("transformers", reason="needs transformers: pip install -e .[dev]")


def save(name: str, directory: Path, **how: Any) -> PreTrainedModel:
    """Make the checkpoint CONFIGS[name] with random weights, and save it with a tokenizer of one token a word."""
    transformers = imported_transformers()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, CONFIGS[name].kind)(**CONFIGS[name].settings)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # As initialised, logits and biases are almost flat; spread, every weight matters and no two tokens tie.
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.15)
    model.save_pretrained(directory, **how)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(directory / "tokenizer.json"))
    return model


def prompts(count: int, longest: int, seed: int, shared: int = 0) -> list[list[int]]:
    """`count` prompts of 1 to `longest` random tokens; every other one begins with the same `shared` ones."""
    rng = random.Random(seed)
    prefix = [rng.randrange(1, VOCAB_SIZE) for _ in range(shared)]
    lengths = [1, longest, *(rng.randint(1, longest) for _ in range(count - 2))]
    drawn = [[rng.randrange(1, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    return [(prefix + prompt)[: len(prompt)] if index % 2 else prompt for index, prompt in enumerate(drawn)]


def generate(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy, on its own, until the end token or `max_tokens`."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@torch.inference_mode()
def logits(directory: Path, prompt: list[int], dtype: torch.dtype) -> torch.Tensor:
    """What transformers computes for every token of the prompt, in fp32: [tokens, vocabulary]."""
    model = imported_transformers().AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    computed: torch.Tensor = model(torch.tensor([prompt])).logits[0].float()
    return computed


@torch.inference_mode()
def engine_logits(loaded: LoadedModel, prompt: list[int], dtype: torch.dtype) -> torch.Tensor:
    """What the engine computes for it, in two chunks and a single token through a paged cache."""
    block_size = 16
    count = 1 + len(prompt) // block_size
    tables = [list(range(1 + group * count, 1 + (group + 1) * count)) for group in range(len(loaded.config.kv_groups))]
    cache = PagedKV(loaded.config, 1 + len(tables) * count, block_size, "cpu", dtype)
    layout = StepLayout(loaded.config, block_size, "cpu", 0)
    request = Request(1, "r", prompt, SamplingParams())
    parts = []
    for end in (len(prompt) // 2, len(prompt) - 1, len(prompt)):
        count = end - request.num_computed_tokens
        batch = layout.lay_out(plan((request, count)), {1: tables})
        hidden = loaded.module.forward(batch.token_ids, batch.positions, BatchAttention(cache, batch))
        parts.append(loaded.module.logits(hidden).float())
        request.num_computed_tokens = end
    return torch.cat(parts)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The root mean square of the difference, as a share of that of `other`."""
    return float((one - other).square().mean().sqrt() / other.square().mean().sqrt())


def edit(directory: Path, **changes: Any) -> None:
    """Change settings of its config.json; None takes one out."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    gone = {name for name, value in changes.items() if value is None}
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in gone}))
