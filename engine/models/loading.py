"""From a directory or a name to a model that can run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ..config import AUTO, TINY, EngineConfig
from . import tiny
from .checkpoint import Checkpoint, read_json
from .gpt2 import GPT2
from .layers import Model, ModelConfig
from .llama import TRAITS, Llama
from .tokens import ByteTokenizer, DirectoryTokenizer, Tokenizer

ARCHITECTURES: Final[dict[str, Callable[[Checkpoint, int | None], Model]]] = {
    "GPT2LMHeadModel": GPT2,
    **dict.fromkeys(TRAITS, Llama),
}


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, on its device."""

    config: ModelConfig
    module: Model
    tokenizer: Tokenizer

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.nbytes for weight in self.module.weights())

    @property
    def dtype(self) -> str:
        """Of the weights, in torch's words."""
        return str(next(iter(self.module.weights())).dtype).removeprefix("torch.")


def load_model(config: EngineConfig) -> LoadedModel:
    """Return the model that `config` names, in its dtype on its device.

    Raises ValueError, saying what is missing or not supported and what is.
    """
    if config.device != "cpu":
        if not torch.cuda.is_available():
            raise ValueError(f"device is {config.device!r}, but this machine has no CUDA device that torch can use")
        # Steps of many sizes leave holes in the allocator's blocks, gigabytes of them, unless these can grow.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    dtype: torch.dtype = getattr(torch, _own_dtype(config) if config.dtype == AUTO else config.dtype)
    tokenizer: Tokenizer
    if config.model == TINY:
        checkpoint, tokenizer = tiny.checkpoint(config.seed, dtype, config.device), ByteTokenizer()
    else:
        directory = Path(config.model)
        checkpoint = Checkpoint.read(directory, dtype, config.device)
        tokenizer = DirectoryTokenizer(directory)
    architecture = (checkpoint.setting("architectures", None) or ["(none named)"])[0]
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"{config.model} is a {architecture}, which is not supported; there are {known}")
    module = ARCHITECTURES[architecture](checkpoint, config.max_model_len)
    checkpoint.refuse_the_rest()
    return LoadedModel(module.config, module, tokenizer)


def _own_dtype(config: EngineConfig) -> str:
    """Return the type of the checkpoint's weights, or bfloat16 if its settings state none."""
    if config.model == TINY:
        return "float32"
    settings = read_json(Path(config.model) / "config.json")
    return str(settings.get("dtype") or settings.get("torch_dtype") or "bfloat16")
