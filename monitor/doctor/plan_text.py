"""`monitor plan` at a terminal of 80 columns."""

from __future__ import annotations

from rich.console import Console

from kvscope.monitor.doctor.terminal import put_line, wrapped
from kvscope.monitor.planning.capacity_plan import GIB_BYTES, CapacityPlan


def show_plan(plan: CapacityPlan, console: Console) -> None:
    """Print the pool, the requests that it holds, the settings that follow, and what was assumed."""
    put_line(console, f"KV POOL  {plan.model}, vLLM {plan.release}, one rank", "bold")
    rows = [
        ("memory for KV", f"{plan.kv_bytes / GIB_BYTES:,.2f} GiB"),
        ("blocks", f"{plan.blocks:,} of {plan.block_size} tokens, {plan.bytes_per_block:,} bytes each"),
        ("each token of a request", f"{plan.bytes_per_token:,} bytes"),
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
        put_line(console, f"  {setting.flag} {setting.value}")
        wrapped(console, f"{setting.why[0].upper()}{setting.why[1:]}.", "      ", "dim")
    for assumption in plan.assumed:
        wrapped(console, f"Assumed: {assumption}.", "  ")
    for note in plan.notes:
        wrapped(console, f"Note: {note}.", "  ")
