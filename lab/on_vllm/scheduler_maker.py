"""Makes vLLM's scheduler without a server and without a model, in whatever form the release of vLLM has it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from .cache_groups import takes

TINY_LLAMA: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""For `--load-format dummy`: only its shape is there."""


def save_config(directory: Path, max_model_len: int = 4096) -> Path:
    """Write the configuration of a model without weights into `directory`, which is made, and return it."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(TINY_LLAMA | {"max_position_embeddings": max_model_len}))
    return directory


class AnyGrammar:
    """A compiled grammar that accepts every token."""

    grammar = None

    def accept_tokens(self, _request_id: str, _tokens: list[int]) -> bool:
        """Accept them."""
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return those that it accepts: all."""
        return tokens

    def is_terminated(self) -> bool:
        """Never."""
        return False

    def rollback(self, _count: int) -> None:
        """Do nothing: no state was advanced."""


def configured(
    model: str,
    block_size: int,
    max_num_seqs: int,
    max_tokens: int,
    groups: Sequence[Sequence[Any]],
    loras: int,
    max_model_len: int = 4096,
    **settings: Any,
) -> Any:
    """Return vLLM's configuration.

    Its platforms refuse some block sizes, which mean nothing without a model: it is set afterwards.
    """
    from vllm.config import LoRAConfig
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_tokens,
        **settings,
    ).create_engine_config()
    config.cache_config.block_size = block_size
    modes = {group[1] for group in groups if group[0] == "mamba"}
    if modes and hasattr(config.cache_config, "mamba_cache_mode"):
        (config.cache_config.mamba_cache_mode,) = modes
        config.cache_config.block_size = max(int(group[2]) if len(group) > 2 else block_size for group in groups)
    if loras:
        config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=loras)
    return config


def scheduler_of(config: Any, cache: tuple[Any, int, int]) -> tuple[Any, Any]:
    """Make the scheduler of this configuration. cache: as cache_config returns it.

    Returns it and the function that hashes the blocks of its requests.
    """
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    try:
        from vllm.utils.hashing import get_hash_fn_by_name
    except ImportError:  # up to 0.10
        from vllm.utils import get_hash_fn_by_name

    groups, block_size, hash_block_size = cache
    scheduler = (AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler)(
        vllm_config=config,
        kv_cache_config=groups,
        structured_output_manager=StructuredOutputManager(config),
        log_stats=True,
        **takes(Scheduler, block_size=block_size, hash_block_size=hash_block_size),
    )
    hash_of = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_of)
    return scheduler, get_request_block_hasher(hash_block_size, hash_of)
