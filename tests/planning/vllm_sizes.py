"""What vLLM's own KV-cache code makes of a model's configuration, with no weights: run by a Python that has vLLM.

    PYTHON -m tests.planning.vllm_sizes < CASES

CASES is a JSON list of {config, arguments, available_bytes}: the model's config.json, EngineArgs by name, and the
bytes for KV. Prints a JSON list of what `sizes_of` returns, or {error}, by case.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment
from vllm.distributed.parallel_state import destroy_model_parallel, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import MambaSpec


def main() -> None:
    registry._run_in_subprocess = lambda inspect: inspect()  # a new process for each family takes half a minute
    for name in ("gelu_new", "gelu_tanh_and_mul"):  # of kernels that an unpacked release lacks; none is called
        if not hasattr(torch.ops._C, name):
            torch.library.define(f"_C::{name}", "(Tensor! result, Tensor input) -> ()")
    # On a processor with AVX-512 BF16 the CPU platform keeps the states of all hybrids in 32 bits; no GPU does.
    torch.cpu._is_avx512_bf16_supported = lambda: False
    answers = []
    for case in json.load(sys.stdin):
        try:
            answers.append(sizes_of(case))
        except Exception as error:
            traceback.print_exc()
            answers.append({"error": f"{type(error).__name__}: {error}"})
    print(json.dumps(answers))


def sizes_of(case: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(case["config"]))
        arguments = EngineArgs(model=directory, skip_tokenizer_init=True, load_format="dummy", **case["arguments"])
        config = arguments.create_engine_config()
        config.compilation_config.custom_ops = ["none"]  # an unpacked release has none of its own
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
            destroy_model_parallel()  # its groups depend on the model: there is one of experts for a mixture of them
            initialize_model_parallel(1, 1)
            with torch.device("meta"):
                initialize_model(config)
            if hasattr(current_platform, "update_block_size_for_backend"):
                current_platform.update_block_size_for_backend(config)
            layers = config.compilation_config.static_forward_context
            asked = {
                name: layer.get_kv_cache_spec(config)
                for name, layer in layers.items()
                if isinstance(layer, AttentionLayerBase)
            }
            if hasattr(config.cache_config, "kv_cache_layout"):
                config.cache_config.kv_cache_layout = "LBNHC"
            specs = {name: spec for name, spec in asked.items() if spec is not None}
            cache = cache_of(config, specs, case["available_bytes"])
            concurrency = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, cache)
    return {
        "release": vllm.__version__,
        "max_model_len": config.model_config.max_model_len,
        "steps_in_flight": getattr(config, "max_concurrent_batches", 1),
        "block_size": config.cache_config.block_size,
        "per_layer": [_bytes_of(spec) for spec in specs.values()],
        "groups": [len(group.layer_names) for group in cache.kv_cache_groups],
        "blocks": cache.num_blocks,
        "concurrency": concurrency,
    }


def cache_of(config: Any, specs: dict[str, Any], available_bytes: int) -> Any:
    if hasattr(kv_cache_utils, "get_kv_cache_configs"):
        (cache,) = kv_cache_utils.get_kv_cache_configs(config, [specs], [available_bytes])
        return cache
    planning = importlib.import_module("vllm.v1.core.kv_cache_planning")  # since 0.33
    groups = planning.get_kv_cache_groups(config, specs)
    (cache,) = planning.get_kv_cache_configs(config, [specs], [available_bytes], groups)
    return cache


def _bytes_of(spec: Any) -> float:
    """Of one token, or of a state without its padding."""
    if isinstance(spec, MambaSpec):
        return float(dataclasses.replace(spec, page_size_padded=None).page_size_bytes)
    return float(spec.page_size_bytes / spec.block_size)


if __name__ == "__main__":
    main()
