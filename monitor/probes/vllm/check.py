"""Whether the vLLM of this Python has what the probe hooks into: `monitor probe check` runs it there.

vLLM guarantees its plugins' entry point, and nothing of what a plugin wraps. So after an upgrade, look.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from importlib.metadata import entry_points
from typing import Final, NamedTuple

OK: Final = 0
MISSING: Final = 1
NO_VLLM: Final = 3
GROUP: Final = "vllm.general_plugins"


class Hook(NamedTuple):
    """A method that the probe wraps, what arguments of it the probe reads, and what is not said without it."""

    place: str
    method: str
    arguments: tuple[str, ...]
    lost: str
    needed: bool = False
    """Without it there is no stream worth reading; others are missing from some releases for good reason."""


SCHEDULER, MANAGER, POOL = (
    "vllm.v1.core.sched.scheduler:Scheduler",
    "vllm.v1.core.kv_cache_manager:KVCacheManager",
    "vllm.v1.core.block_pool:BlockPool",
)
HOOKS: Final = (
    Hook(SCHEDULER, "__init__", (), "everything", True),
    Hook(SCHEDULER, "add_request", ("request",), "requests", True),
    Hook(SCHEDULER, "schedule", (), "steps", True),
    Hook(SCHEDULER, "update_from_output", ("scheduler_output", "model_runner_output"), "steps", True),
    Hook(SCHEDULER, "_free_request", ("request",), "ends of requests, and deferred frees", True),
    Hook(SCHEDULER, "_free_blocks", ("request",), "completions of deferred frees", True),
    Hook(SCHEDULER, "_preempt_request", ("request",), "preemptions", True),
    Hook(SCHEDULER, "finish_requests", (), "the time of aborts"),
    Hook(SCHEDULER, "_handle_stopped_request", ("request",), "streaming sessions that wait"),
    Hook(SCHEDULER, "_update_from_kv_xfer_finished", (), "ends of remote loads"),
    Hook(SCHEDULER, "shutdown", (), "the end of the engine"),
    Hook(MANAGER, "pop_blocks_for_free", ("request",), "blocks that wait for a step in flight (0.24 and later)"),
    Hook(POOL, "get_new_blocks", (), "blocks handed out", True),
    Hook(POOL, "touch", ("blocks",), "prefix hits", True),
    Hook(POOL, "free_blocks", ("ordered_blocks",), "blocks given back", True),
    Hook(POOL, "cache_full_blocks", ("request", "blocks", "num_cached_blocks", "num_full_blocks"), "prefixes", True),
    Hook(POOL, "reset_prefix_cache", (), "resets of the prefix cache", True),
    Hook(POOL, "evict_blocks", ("block_ids",), "prefixes that a failed load made invalid"),
    Hook(POOL, "cache_partial_block", (), "blocks cached in part (0.24 and later)"),
    Hook(POOL, "move_block_hashes", ("src_block", "dst_block"), "prefixes that move to another block (0.26 and later)"),
)  # fmt: skip


def problem(hook: Hook) -> str:
    """What is wrong with it in this vLLM; empty if nothing is."""
    module, _, name = hook.place.partition(":")
    try:
        method = getattr(getattr(importlib.import_module(module), name), hook.method)
    except (ImportError, AttributeError) as error:
        return str(error)
    absent = [argument for argument in hook.arguments if argument not in inspect.signature(method).parameters]
    return f"it takes no {', '.join(absent)}" if absent else ""


def main() -> int:
    """Print what was found, a line a hook; the exit code."""
    try:
        import vllm
    except ImportError as error:
        print(f"there is no vLLM in {sys.executable}: {error}")
        return NO_VLLM
    print(f"vLLM {vllm.__version__} in {sys.executable}")
    needed = False
    for hook in HOOKS:
        wrong = problem(hook)
        needed |= bool(wrong) and hook.needed
        where = f"{hook.place.rpartition(':')[2]}.{hook.method}"
        print(f"  {'MISSING' if wrong and hook.needed else 'absent ' if wrong else 'ok     '} {where}", end="")
        print(f": {wrong}; not said: {hook.lost}" if wrong else "")
    found = any(point.name == "kvscope" for point in entry_points(group=GROUP))
    allowed = os.environ.get("VLLM_PLUGINS")
    left_out = allowed is not None and "kvscope" not in allowed.split(",")
    if not found:
        print(f"  MISSING the plugin: kvscope is not installed there (entry point {GROUP}): pip install kvscope")
    elif left_out:
        print(f"  MISSING the plugin: VLLM_PLUGINS is {allowed!r} and leaves kvscope out")
    if needed or not found or left_out:
        return MISSING
    print("The probe works with it. KVSCOPE_EVENTS=tcp://127.0.0.1:5757 in vLLM's environment switches it on.")
    return OK


if __name__ == "__main__":
    sys.exit(main())
