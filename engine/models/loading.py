"""From a directory or a name to a model that can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from kvscope.engine.config import TINY, EngineConfig
from kvscope.engine.models import tiny
from kvscope.engine.models.checkpoint import Checkpoint
from kvscope.engine.models.gpt2 import GPT2
from kvscope.engine.models.layers import Model, ModelConfig
from kvscope.engine.models.llama import Llama
from kvscope.engine.models.llama_families import TRAITS
from kvscope.engine.models.tokens import ByteTokenizer, DirectoryTokenizer, Tokenizer

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


def load_model(config: EngineConfig) -> LoadedModel:
    """Return the model that `config` names, in its dtype on its device.

    Raises ValueError, saying what is missing or not supported and what is.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    if config.device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device is {config.device!r}, but this machine has no CUDA device that torch can use")
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
