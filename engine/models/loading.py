"""From a directory or a name to a model that can run."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from engine.config import EngineConfig
from engine.models.tokens import Tokenizer


@dataclass(frozen=True)
class ModelConfig:
    """A model's shape. `max_model_len` is what the engine serves: as set, or the model's own."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, on its device."""

    config: ModelConfig
    module: nn.Module
    tokenizer: Tokenizer

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.nbytes for weight in self.module.parameters())


def load(config: EngineConfig) -> LoadedModel:
    """The model that `config` names, in its dtype on its device.

    Raises ValueError, saying what is missing or not supported and what is.
    """
    raise NotImplementedError
