"""`monitor plan`: how large the KV pool is, how many requests it holds, and which settings follow."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from kvscope.monitor.commands.shared_flags import Commands, print_json, size
from kvscope.monitor.doctor.memory_report import bill_in_log
from kvscope.monitor.doctor.plan_text import show_plan
from kvscope.monitor.doctor.report import NOTHING
from kvscope.monitor.errors import BadQuestion, BadTarget
from kvscope.monitor.planning.capacity_plan import ExpectedLoad, MemoryBudget, plan_capacity
from kvscope.monitor.planning.kv_pool import EngineSettings
from kvscope.monitor.planning.model_shape import ModelShape, shape_of, shape_of_numbers

MAX_CONFIG_BYTES: Final = 4 << 20
MAX_INDEX_BYTES: Final = 64 << 20
INDEXES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Where a model's directory has the size of its weights."""
EPILOG: Final = """examples:
  monitor plan ./Llama-3.1-8B --device-memory 80G --prompt-len 2000 --output-len 500
  monitor plan config.json --log server.log --shared-prefix 1500 --prompt-len 2000 --output-len 300
  monitor plan --layers 32 --kv-heads 8 --head-dim 128 --kv-cache-memory 20G --max-model-len 131072

Sizes are of one rank. `--log` takes the memory breakdown from the engine's start-up. exit codes: 0, 2 for bad input"""


def add(commands: Commands) -> None:
    """Put it on the command line."""
    parser = commands.add_parser(
        "plan",
        help="how large the KV pool is, how many requests it holds, what to set",
        description="Computes the KV pool from a model's config.json and the memory of a device: tokens, blocks,"
        " requests at once, the longest request, and the settings that follow.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a config.json, or a directory that has one")
    numbers = parser.add_argument_group("instead of MODEL")
    for flag, help in (
        ("--layers", "layers with full attention"),
        ("--kv-heads", "heads of keys and values"),
        ("--head-dim", "numbers in a head"),
    ):
        numbers.add_argument(flag, type=int, metavar="N", help=help)
    memory = parser.add_argument_group("memory of one device")
    memory.add_argument("--device-memory", type=size, metavar="SIZE", help="in all, such as 80G")
    memory.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE", help="(0.9; since 0.32 0.92)")
    memory.add_argument("--weights", type=size, metavar="SIZE", help="of the model on one rank (default: its files)")
    memory.add_argument("--other", type=size, metavar="SIZE", help="activations, graphs, libraries (2G is assumed)")
    memory.add_argument("--kv-cache-memory", type=size, metavar="SIZE", help="for KV; the rest is not needed then")
    memory.add_argument("--log", metavar="FILE", help="an engine's log: its memory breakdown is taken")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--release", default="0.33", metavar="X.Y", help="of vLLM (0.33)")
    for flag, default in (
        ("--tensor-parallel-size", 1),
        ("--pipeline-parallel-size", 1),
        ("--block-size", 16),
        ("--max-num-batched-tokens", 8192),
        ("--max-num-seqs", 0),
        ("--max-model-len", 0),
    ):
        engine.add_argument(flag, type=int, default=default, metavar="N", help=f"({default})" if default else None)
    engine.add_argument("--kv-cache-dtype", default="auto", metavar="DTYPE", help="auto, fp8, bfloat16, … (auto)")
    engine.add_argument("--no-prefix-caching", action="store_true", help="prefixes are not cached")
    engine.add_argument("--no-async-scheduling", action="store_true", help="one step at a time")
    load = parser.add_argument_group("requests that are expected, in tokens")
    for flag in ("--prompt-len", "--output-len", "--shared-prefix"):
        load.add_argument(flag, type=int, default=0, metavar="N")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="(default: table)")
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    release = _release(parsed.release)
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "block_size", "max_num_batched_tokens"):
        if getattr(parsed, name) < 1:
            raise BadQuestion(f"--{name.replace('_', '-')} is {getattr(parsed, name)}: it is at least 1")
    shape = _shape(parsed)
    settings = EngineSettings(
        release=release,
        block_size=parsed.block_size,
        max_num_batched_tokens=parsed.max_num_batched_tokens,
        pipeline_parallel=parsed.pipeline_parallel_size,
        prefix_caching=not parsed.no_prefix_caching,
        steps_in_flight=1 if parsed.no_async_scheduling else 2,
    )
    demand = ExpectedLoad(
        prompt=parsed.prompt_len,
        output=parsed.output_len,
        shared_prefix=parsed.shared_prefix,
        max_model_len=parsed.max_model_len,
        max_num_seqs=parsed.max_num_seqs,
    )
    found = plan_capacity(shape, settings, _budget(parsed, release), demand)
    if parsed.format == "json":
        print_json(found)
    else:
        show_plan(found, Console(highlight=False))
    return NOTHING


def _release(text: str) -> tuple[int, int]:
    parts = text.removeprefix("v").split(".")
    if len(parts) < 2 or not all(part.isdecimal() for part in parts[:2]):
        raise BadQuestion(f"--release {text} is no release of vLLM: write 0.33")
    return int(parts[0]), int(parts[1])


def _shape(parsed: argparse.Namespace) -> ModelShape:
    numbers = (parsed.layers, parsed.kv_heads, parsed.head_dim)
    if parsed.model is None:
        if None in numbers:
            raise BadQuestion("give a MODEL, or --layers, --kv-heads and --head-dim")
        if min(numbers) < 1:
            raise BadQuestion("--layers, --kv-heads and --head-dim are at least 1")
        return shape_of_numbers(*numbers, parsed.kv_cache_dtype, parsed.tensor_parallel_size)
    if any(number is not None for number in numbers):
        raise BadQuestion("give a MODEL or its numbers, not both")
    return shape_of(_read_json(_config_path(parsed.model)), parsed.kv_cache_dtype, parsed.tensor_parallel_size)


def _config_path(model: str) -> Path:
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise BadTarget(f"{model} is neither a config.json nor a directory that has one; kvscope downloads no model")
    return path


def _read_json(path: Path, limit: int = MAX_CONFIG_BYTES) -> Mapping[str, Any]:
    if path.stat().st_size > limit:
        raise BadTarget(f"{path} is larger than {limit >> 20} MiB: it is not a model's configuration or index")
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise BadTarget(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadTarget(f"{path} is no model's configuration: it is not a JSON object")
    return dict(found)


def _budget(parsed: argparse.Namespace, release: tuple[int, int]) -> MemoryBudget:
    share = parsed.gpu_memory_utilization
    if share is None:
        share = 0.92 if release >= (0, 32) else 0.9
    given = MemoryBudget(
        device=parsed.device_memory,
        utilization=share,
        weights=parsed.weights if parsed.weights is not None else _size_of_files(parsed),
        other=parsed.other,
        kv=parsed.kv_cache_memory,
    )
    if parsed.log is None:
        return given
    report = bill_in_log(parsed.log)
    if (bill := report.breakdown) is not None:
        if parsed.gpu_memory_utilization is None:
            share = bill.requested / bill.device_total
        return MemoryBudget(
            device=bill.device_total,
            free_at_start=bill.free_at_start,
            utilization=share,
            weights=bill.weights,
            other=bill.without_kv - bill.weights,
            kv=given.kv,
            source="measured",
        )
    if given.kv is None and (gib := report.sizing.get("available_kv_cache_gib")) is not None:
        return MemoryBudget(kv=round(float(gib) * (1 << 30)), source="measured")
    if given.kv is None and given.device is None:
        raise BadTarget(f"{parsed.log} states no memory for KV: it lacks {'; '.join(report.missing)}")
    return given


def _size_of_files(parsed: argparse.Namespace) -> int | None:
    """What the model's index says of its weights, divided among the ranks."""
    if parsed.model is None or not Path(parsed.model).is_dir():
        return None
    for name in INDEXES:
        path = Path(parsed.model) / name
        if path.is_file():
            metadata = _read_json(path, MAX_INDEX_BYTES).get("metadata")
            total = metadata.get("total_size") if isinstance(metadata, dict) else None
            if isinstance(total, int) and total > 0:
                return int(total) // (int(parsed.tensor_parallel_size) * int(parsed.pipeline_parallel_size))
    return None
