"""`monitor plan`: how large the KV pool is, how many requests it holds, and which settings follow."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

from ...base.errors import BadQuestion, BadTarget, CannotTell
from ...detectors.detector import Settings
from ...planning.known_models import known_model
from ...planning.plan_request import PlanRequest, load_in_plan, plan_from_request
from ...planning.plan_types import GIB_BYTES, CapacityPlan, MemoryBudget
from ...questions.observe import observe
from ...service.settings_table import positive, size
from ..memory_report import breakdown_in_log
from ..report import NOTHING
from ..terminal import put_line, terminal_console, wrapped
from .shared_flags import print_json

MAX_CONFIG_BYTES: Final = 4 << 20
MAX_INDEX_BYTES: Final = 64 << 20
INDEXES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Where a model's directory has the size of its weights."""
MEASURED_FOR_S: Final = 3.0
NOT_ASKED_OF_AN_ENGINE: Final = ("release", "pipeline_parallel_size", "prefix_caching", "async_scheduling")
EPILOG: Final = """examples:
  monitor plan ./Llama-3.1-8B --device-memory 80G --prompt-len 2000 --output-len 500
  monitor plan config.json --log server.log --shared-prefix 1500 --prompt-len 2000 --output-len 300
  monitor plan --from http://127.0.0.1:8000/metrics
  monitor plan --layers 32 --kv-heads 8 --head-dim 128 --kv-cache-memory 20G --max-model-len 131072

Sizes are of one rank. `--log` takes the memory breakdown from the engine's start-up.

exit codes: 0, 2 for bad input"""


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    parser.description = (
        "Computes the KV pool from a model's config.json and a device's memory: tokens, blocks,"
        " concurrent requests, the longest request, and the resulting settings."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a config.json, a directory that has one, or a known name such as gpt2",
    )
    numbers = parser.add_argument_group("instead of MODEL")
    for flag, help in (
        ("--layers", "layers with full attention"),
        ("--kv-heads", "heads of keys and values"),
        ("--head-dim", "numbers in a head"),
    ):
        numbers.add_argument(flag, type=int, metavar="N", help=help)
    _add_memory_flags(parser)
    measured = parser.add_argument_group("from what was measured")
    measured.add_argument(
        "--from",
        dest="source",
        metavar="TARGET",
        help="a log, a metrics page, a recording or a service from which to take lengths, hits and concurrency",
    )
    measured.add_argument("--engine", default="", metavar="NAME", help="the engine, if TARGET has several")
    measured.add_argument(
        "--timeout", type=positive, default=10.0, metavar="S", help=("seconds to wait for TARGET (default: 10)")
    )
    measured.add_argument(
        "--token",
        default=os.environ.get("KVSCOPE_TOKEN", ""),
        metavar="TOKEN",
        help="the service's token (default: KVSCOPE_TOKEN)",
    )
    _add_engine_flags(parser)
    load = parser.add_argument_group("the expected requests, in tokens")
    for flag in ("--prompt-len", "--output-len", "--shared-prefix"):
        load.add_argument(flag, type=int, metavar="N")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="(default: table)")
    parser.set_defaults(run=_run)


def _add_memory_flags(parser: argparse.ArgumentParser) -> None:
    memory = parser.add_argument_group("memory of one device")
    memory.add_argument("--device-memory", type=size, metavar="SIZE", help="memory of the device, such as 80G")
    memory.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="share of it that vLLM uses (default: 0.92, before release 0.32: 0.9)",
    )
    memory.add_argument(
        "--weights", type=size, metavar="SIZE", help="size of the weights on one rank (default: that of its files)"
    )
    memory.add_argument(
        "--other", type=size, metavar="SIZE", help="memory for activations, graphs and libraries (default: 2G)"
    )
    memory.add_argument(
        "--kv-cache-memory", type=size, metavar="SIZE", help="memory for KV, instead of the flags above"
    )
    memory.add_argument("--log", metavar="FILE", help="an engine's log from which to take the memory breakdown")


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument("--release", default="", metavar="X.Y", help="release of vLLM (default: 0.33)")
    for flag, default in (
        ("--tensor-parallel-size", 1),
        ("--pipeline-parallel-size", 1),
    ):
        engine.add_argument(flag, type=int, default=default, metavar="N", help=f"(default: {default})")
    for flag, without in (
        ("--block-size", "tokens in a block (default: 16)"),
        ("--max-num-batched-tokens", "(default: 8192)"),
        ("--max-num-seqs", "(default: no limit)"),
        ("--max-model-len", "(default: the model's)"),
    ):
        engine.add_argument(flag, type=int, metavar="N", help=without)
    engine.add_argument(
        "--kv-cache-dtype", default="auto", metavar="DTYPE", help="auto, fp8, bfloat16, … (default: auto)"
    )
    engine.add_argument("--no-prefix-caching", action="store_true", help="plan without prefix caching")
    engine.add_argument("--no-async-scheduling", action="store_true", help="plan without asynchronous scheduling")


def _run(parsed: argparse.Namespace) -> int:
    config = _config(parsed)
    request = _plan_request(parsed, config is None)
    if parsed.source is not None:
        found = _measured_plan(parsed, request, config)
    else:
        found = plan_from_request(request, config=config, budget=_budget_of_log(parsed, request))
    if parsed.format == "json":
        print_json(found)
    else:
        show_plan(found, terminal_console())
    return NOTHING


def _plan_request(parsed: argparse.Namespace, by_name: bool) -> PlanRequest:
    given = {name: getattr(parsed, name) for name in PlanRequest.__struct_fields__ if hasattr(parsed, name)}
    given |= {"prefix_caching": not parsed.no_prefix_caching, "async_scheduling": not parsed.no_async_scheduling}
    given["model"] = (parsed.model or "") if by_name else ""
    if parsed.weights is None:
        given["weights"] = _size_of_files(parsed)
    return PlanRequest(**given)


def _config(parsed: argparse.Namespace) -> Mapping[str, Any] | None:
    """Return the configuration of a model in a file, or None for one that is known by name, and where no model is
    given.
    """
    if parsed.model is None or (known_model(parsed.model) is not None and not Path(parsed.model).exists()):
        return None
    return _read_json(_config_path(parsed.model))


def _measured_plan(parsed: argparse.Namespace, request: PlanRequest, config: Mapping[str, Any] | None) -> CapacityPlan:
    """Return the plan with the load of the engine at `--from`, and its pool where no model is given."""
    observation = observe(
        parsed.source, Settings(), timeout_s=parsed.timeout, watch_s=MEASURED_FOR_S, token=parsed.token
    )
    with closing(observation):
        engines = [view.engine for view in observation.engines()]
        if not engines:
            raise CannotTell(f"{parsed.source} shows no engine whose load could be measured")
        engine = engines[0]
        if len(engines) > 1 and parsed.engine not in engines:
            raise BadQuestion(f"{parsed.source} has {len(engines)} engines: give --engine, one of {', '.join(engines)}")
        engine = parsed.engine or engine
        if config is None:
            asked = {
                name: value
                for name, value in msgspec.structs.asdict(request).items()
                if name not in NOT_ASKED_OF_AN_ENGINE and value is not None
            }
            return observation.query.plan(engine, **asked)
        return plan_from_request(
            request,
            config=config,
            budget=_budget_of_log(parsed, request),
            measured=load_in_plan(observation.query.plan(engine)),
        )


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
        raise BadTarget(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadTarget(f"{path} is not a model configuration: it is not a JSON object")
    return dict(found)


def _budget_of_log(parsed: argparse.Namespace, request: PlanRequest) -> MemoryBudget | None:
    """Return the memory breakdown of `--log`, or None without one, or where it states less than the flags do."""
    if parsed.log is None:
        return None
    report = breakdown_in_log(parsed.log)
    if (breakdown := report.breakdown) is not None:
        share = request.gpu_memory_utilization
        return MemoryBudget(
            device=breakdown.device_total,
            free_at_start=breakdown.free_at_start,
            utilization=share if share is not None else breakdown.requested / breakdown.device_total,
            weights=breakdown.weights,
            other=breakdown.without_kv - breakdown.weights,
            kv=request.kv_cache_memory,
            source="measured",
        )
    if request.kv_cache_memory is None and (gib := report.sizing.get("available_kv_cache_gib")) is not None:
        return MemoryBudget(kv=round(float(gib) * GIB_BYTES), source="measured")
    if request.kv_cache_memory is None and request.device_memory is None:
        raise BadTarget(f"{parsed.log} states no memory for KV: it lacks {'; '.join(report.missing)}")
    return None


def _size_of_files(parsed: argparse.Namespace) -> int | None:
    """Return the size of the weights by the model's index, divided among the ranks."""
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


# -------------------------------------------------------------------- how it is printed, in 80 columns


def show_plan(plan: CapacityPlan, console: Console) -> None:
    """Print the pool, the requests that it holds, the settings that follow, and what was assumed."""
    put_line(console, f"KV POOL  {plan.model}, vLLM {plan.release}, one rank", "bold")
    each = f", {plan.bytes_per_block:,} bytes each" if plan.bytes_per_block else ""
    rows = [("blocks", f"{plan.blocks:,} of {plan.block_size} tokens{each}")]
    if plan.kv_bytes is not None:
        rows.insert(0, ("memory for KV", f"{plan.kv_bytes / GIB_BYTES:,.2f} GiB"))
    if plan.bytes_per_token is not None:
        rows.append(("each token of a request", f"{plan.bytes_per_token:,} bytes"))
    rows += [
        ("tokens", f"{plan.pool_tokens:,}"),
        ("longest request", f"{plan.longest_request:,} tokens"),
        (f"requests of {plan.max_model_len:,} tokens", f"{plan.max_concurrency:.2f} at once"),
    ]
    if plan.requests_at_once is not None:
        rows.append((f"requests of {plan.request_tokens:,} tokens", f"{plan.requests_at_once:,} at once"))
    if plan.requests_at_once_sharing is not None:
        rows.append(("  with the shared prefix", f"{plan.requests_at_once_sharing:,} at once"))
    if plan.limited_by is not None:
        rows.append(("limited by", plan.limited_by))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        put_line(console, f"  {name:<{width}}  {value}")
    if sum(group.groups for group in plan.groups) > 1:
        console.print()
        put_line(console, "KV CACHE GROUPS", "bold")
        for group in plan.groups:
            count = f"{group.groups} x {group.layers} layer{'s' if group.layers != 1 else ''}"
            need = f"{group.blocks_at_full_length:,} at full length"
            put_line(console, f"  {group.kind:<18}{count:>14}, blocks of {group.block_size} tokens, {need}")
    console.print()
    put_line(console, "SETTINGS", "bold")
    for setting in plan.settings:
        put_line(console, f"  {setting.flag} {setting.value}{'   (limits)' if setting.limits else ''}")
        wrapped(console, f"{setting.why[0].upper()}{setting.why[1:]}.", "      ", "dim")
        if setting.costs:
            wrapped(console, f"Cost: {setting.costs}.", "      ", "dim")
    _show_inputs(plan, console)
    for assumption in plan.assumed:
        wrapped(console, f"Assumed: {assumption}.", "  ")
    for note in plan.notes:
        wrapped(console, f"Note: {note}.", "  ")


def _show_inputs(plan: CapacityPlan, console: Console) -> None:
    """Print a line for each input: its value and where it is from."""
    if not plan.inputs:
        return
    console.print()
    put_line(console, "INPUTS", "bold")
    for one in plan.inputs:
        value = f"{one.value / GIB_BYTES:,.2f} GiB" if one.unit == "bytes" and not isinstance(one.value, str) else ""
        shown = value or (f"{one.value:,} {one.unit}" if not isinstance(one.value, str) else one.value)
        origin = f"{one.origin} by {one.source}" if one.source else one.origin
        put_line(console, f"  {one.name:<24}{shown:<26}{origin}")
