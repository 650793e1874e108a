"""A checkpoint as it lies in a Hugging Face directory: its settings and its weights by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

_REQUIRED = object()

_NO_EFFECT: Final = frozenset(
    [
        "_attn_implementation",
        "_name_or_path",
        "attention_dropout",
        "attn_pdrop",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "embd_pdrop",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "max_sequence_length",
        "n_ctx",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    ]
)
"""Settings of training, of other tasks or of how transformers works, which change no logit."""
_COMPUTED: Final = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Ends of the names of tables that old releases saved with the weights: masks and frequencies."""


class Checkpoint:
    """The settings (`config`, as config.json has them) and weights of the model `name`.

    Weights are handed out in `dtype` on `device`, and only once, so that no more than needed is kept. `refuse_the_rest`
    finds everything that a model has not used when it is built: it may change the results of other programs.
    """

    def __init__(
        self, name: str, config: Mapping[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype, device: str
    ) -> None:
        self.name = name
        self.config = config
        self.dtype = dtype
        self.device = device
        self._tensors = tensors
        self._asked: set[str] = set()

    @classmethod
    def read(cls, directory: Path, dtype: torch.dtype, device: str) -> Checkpoint:
        """Read a directory. Raises ValueError, naming the file that is missing or cannot be read."""
        if not directory.is_dir():
            raise ValueError(f"model {str(directory)!r} is not a directory: give 'tiny' or a Hugging Face directory")
        config = read_json(directory / "config.json")
        if "quantization_config" in config:
            raise ValueError(f"{directory} is quantised, which is not supported: use the original weights")
        # The end tokens of generation_config.json take precedence over the model's own, as in `generate`.
        generation = directory / "generation_config.json"
        if generation.is_file() and "eos_token_id" in (given := read_json(generation)):
            config["eos_token_id"] = given["eos_token_id"]
        tensors: dict[str, Tensor] = {}
        for path in _weight_files(directory):
            try:
                tensors.update(load_file(path))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"cannot read the weights in {path}: {error}") from error
        return cls(str(directory), config, tensors, dtype, device)

    def setting(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a setting, where null counts as not given. Raises ValueError if it is not there and has no default."""
        value = self.setting_or_null(name, None)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"config.json of {self.name} lacks {name}")
        return default

    def setting_or_null(self, name: str, default: Any) -> Any:
        """Return a setting for which null differs from a missing one."""
        self._asked.add(name)
        return self.config.get(name, default)

    def require(self, name: str, *supported: Any) -> None:
        """Raise ValueError unless the setting, if it is given at all, is one of the supported values."""
        value = self.setting(name, None)
        if value is not None and value not in supported:
            known = " or ".join(repr(choice) for choice in supported)
            raise ValueError(f"{name} of {self.name} is {value!r}; only {known} is supported")

    def eos_token_ids(self) -> frozenset[int]:
        """Return the tokens that end an output, possibly none."""
        ids = self.setting("eos_token_id", [])
        return frozenset([ids] if isinstance(ids, int) else ids)

    def max_model_len(self, setting: str, wanted: int | None) -> int:
        """Return the context to serve: `wanted`, at most the model's own, which is under `setting`. Raises
        ValueError.
        """
        own = int(self.setting(setting))
        if wanted is not None and wanted > own:
            raise ValueError(f"max_model_len is {wanted}, but {self.name} has {own} ({setting}): give that or less")
        return wanted or own

    def has(self, name: str) -> bool:
        """Whether there is such a weight."""
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """Return the weight, which must have this shape. Raises ValueError."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ValueError(f"the weights of {self.name} lack {name}")
        if tensor.shape != shape:
            raise ValueError(f"{name} of {self.name} is {tuple(tensor.shape)}; config.json makes it {shape}")
        return tensor.to(self.device, self.dtype).contiguous()

    def take_head(self, embedding: Tensor, *, tied: bool) -> Tensor:
        """Return the last layer [vocab, hidden]: the embedding itself if config.json declares so, or `tied` where it
        does not.

        Raises ValueError if both are there and differ: the intention is then unknown.
        """
        name = "lm_head.weight"
        if not self.setting("tie_word_embeddings", tied):
            return self.take(name, *embedding.shape)
        if self.has(name) and not torch.equal(self.take(name, *embedding.shape), embedding):
            raise ValueError(
                f"tie_word_embeddings of {self.name} is true, but its {name} is not the embedding:"
                " take out the one that is wrong"
            )
        return embedding

    def refuse_the_rest(self) -> None:
        """Raise ValueError, naming them, if there are settings or weights that the model has not used."""
        architecture = self.config["architectures"][0]
        given = {name for name, value in self.config.items() if value is not None}
        if unknown := given - self._asked - _NO_EFFECT:
            settings = ", ".join(f"{name} ({self.config[name]!r})" for name in sorted(unknown))
            raise ValueError(
                f"config.json of {self.name} has {settings}, which this engine's {architecture} does not know and which"
                " may change its tokens: take out what does not"
            )
        if weights := sorted(name for name in self._tensors if not name.endswith(_COMPUTED)):
            raise ValueError(
                f"{self.name} has {len(weights)} weights that its config.json gives a {architecture} no use for,"
                f" {weights[0]} for one"
            )


def _weight_files(directory: Path) -> list[Path]:
    """model.safetensors, or the shards that its index names. Raises ValueError if one is missing."""
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        raise ValueError(f"{directory} has neither model.safetensors nor model.safetensors.index.json")
    shards = sorted({directory / shard for shard in read_json(index).get("weight_map", {}).values()})
    for shard in shards:
        if not shard.is_file():
            raise ValueError(f"{directory} lacks {shard.name}, which its index names")
    return shards


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in the file. Raises ValueError if there is none."""
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object")
    return content
