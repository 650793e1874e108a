"""`monitor plan` at a terminal of 80 columns."""

from __future__ import annotations

from rich.console import Console

from kvscope.monitor.doctor.terminal import put_line, wrapped
from kvscope.monitor.planning.plan_types import GIB_BYTES, CapacityPlan


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
