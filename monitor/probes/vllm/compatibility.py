"""Whether the vLLM of this Python has what the probe hooks into: `monitor probe check` runs it there.

vLLM guarantees its plugins' entry point, and nothing of what a plugin wraps. So after an upgrade, look.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

OK: Final = 0
MISSING: Final = 1
NO_VLLM: Final = 3
GROUP: Final = "vllm.general_plugins"


class HookedRelease(Protocol):
    """A vLLM, and what is in it. Both raise ImportError or AttributeError if there is none such."""

    def arguments(self, place: str, method: str) -> Iterable[str]:
        """Return the names that a method takes."""

    def written(self, place: str) -> ast.ClassDef:
        """Return a class, as its source has it. Raises OSError as well, where there is no source to read."""


class Hook(NamedTuple):
    """A method that the probe wraps, the arguments that the probe reads, and what the stream lacks without it."""

    place: str
    method: str
    arguments: tuple[str, ...]
    lost: str
    needed: bool = False
    """Without it there is no stream worth reading."""
    since: str = ""
    """The release that brought both the method and what it does: an earlier one loses nothing."""
    instead: Callable[[HookedRelease], bool] | None = None
    """Whether a release that lacks it does the same elsewhere, and in such a way that the probe sees it there."""

    @property
    def not_reported(self) -> str:
        """The events that the stream of a vLLM without it lacks."""
        return f"{self.lost} ({self.since} and later)" if self.since else self.lost


def preempts_within_schedule(release: HookedRelease) -> bool:
    """Whether `schedule` itself frees preempted requests, and no others, while they still count as running (up to
    0.11).

    So the probe sees it: as a free of one that runs, from within `schedule`. Where that is unsure, nothing is guessed.
    """
    try:
        scheduler = release.written(SCHEDULER)
        release.arguments(MANAGER, "free")
    except (ImportError, AttributeError, OSError):
        return False
    schedule = ast.Module([one for one in scheduler.body if getattr(one, "name", "") == "schedule"], [])
    reported = 0
    for block in (node.body for node in ast.walk(schedule) if isinstance(node, ast.FunctionDef | ast.While | ast.If)):
        lines = [ast.unparse(one) for one in block if isinstance(one, ast.Expr | ast.Assign)]
        for place, text in enumerate(lines):
            who, preempted, _ = text.partition(PREEMPTED)
            reported += bool(preempted) and f"{FREES}{who})" in lines[:place]
    return reported == ast.unparse(schedule).count(FREES) == ast.unparse(scheduler).count(PREEMPTED) > 0


def sleeps_in_base(release: HookedRelease) -> bool:
    """Up to 0.10: whether the executor inherits `sleep` and `wake_up` from a class of vLLM 0."""
    try:
        return all(release.arguments(EXECUTOR_BASE, name) is not None for name in ("sleep", "wake_up"))
    except (ImportError, AttributeError):
        return False


FREES: Final = "self.kv_cache_manager.free("
PREEMPTED: Final = ".status = RequestStatus.PREEMPTED"
SCHEDULER, MANAGER, POOL = (
    "vllm.v1.core.sched.scheduler:Scheduler",
    "vllm.v1.core.kv_cache_manager:KVCacheManager",
    "vllm.v1.core.block_pool:BlockPool",
)
GROUP_MANAGER: Final = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
FCFS_QUEUE, PRIORITY_QUEUE = (
    "vllm.v1.core.sched.request_queue:FCFSRequestQueue",
    "vllm.v1.core.sched.request_queue:PriorityRequestQueue",
)
CONNECTOR: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
EXECUTOR, EXECUTOR_BASE = "vllm.v1.executor.abstract:Executor", "vllm.executor.executor_base:ExecutorBase"
FRONT_END, CLIENT, BALANCING_CLIENT = (
    "vllm.v1.engine.output_processor:OutputProcessor",
    "vllm.v1.engine.core_client:MPClient",
    "vllm.v1.engine.core_client:DPLBAsyncMPClient",
)
HOOKS: Final = (
    Hook(SCHEDULER, "__init__", (), "everything", True),
    Hook(SCHEDULER, "add_request", ("request",), "requests", True),
    Hook(SCHEDULER, "schedule", (), "steps", True),
    Hook(SCHEDULER, "update_from_output", ("scheduler_output", "model_runner_output"), "steps", True),
    Hook(SCHEDULER, "_free_request", ("request",), "ends of requests, and deferred frees", True),
    Hook(SCHEDULER, "_free_blocks", ("request",), "completions of deferred frees", True),
    Hook(
        SCHEDULER,
        "_preempt_request",
        ("request",),
        "preemptions",
        True,
        since="0.12",
        instead=preempts_within_schedule,
    ),
    Hook(SCHEDULER, "finish_requests", (), "the time of aborts"),
    Hook(SCHEDULER, "_handle_stopped_request", ("request",), "streaming sessions that wait", since="0.16"),
    Hook(SCHEDULER, "_update_from_kv_xfer_finished", (), "ends of remote loads"),
    Hook(SCHEDULER, "set_pause_state", ("pause_state",), "pauses", since="0.17"),
    Hook(SCHEDULER, "shutdown", (), "the end of the engine"),
    Hook(SCHEDULER, "_try_schedule_encoder_inputs", ("request",), "waits for the encoder"),
    Hook(FCFS_QUEUE, "pop_request", (), "why a request was put back in its queue"),
    Hook(PRIORITY_QUEUE, "pop_request", (), "why a request was put back in its queue by priority"),
    Hook(CONNECTOR, "get_num_new_matched_tokens", ("request",), "waits for the KV connector's answer"),
    Hook(EXECUTOR, "sleep", (), "sleep mode", instead=sleeps_in_base),
    Hook(EXECUTOR, "wake_up", (), "the end of sleep mode", instead=sleeps_in_base),
    Hook(MANAGER, "get_computed_blocks", ("request",), "exact needs of waiting requests"),
    Hook(
        MANAGER,
        "get_computed_blocks_for_connector",
        ("request",),
        "exact needs of requests that wait for a connector",
        since="0.27",
    ),
    Hook(MANAGER, "pop_blocks_for_free", ("request",), "blocks that wait for a step in flight", since="0.24"),
    Hook(POOL, "get_new_blocks", (), "blocks handed out", True),
    Hook(POOL, "touch", ("blocks",), "prefix hits", True),
    Hook(POOL, "free_blocks", ("ordered_blocks",), "blocks given back", True),
    Hook(POOL, "cache_full_blocks", ("request", "blocks", "num_cached_blocks", "num_full_blocks"), "prefixes", True),
    Hook(POOL, "reset_prefix_cache", (), "resets of the prefix cache", True),
    Hook(POOL, "evict_blocks", ("block_ids",), "prefixes that a failed load made invalid", since="0.13"),
    Hook(POOL, "cache_partial_block", (), "blocks cached in part", since="0.24"),
    Hook(POOL, "move_block_hashes", ("src_block", "dst_block"), "prefixes that move to another block", since="0.26"),
    Hook(POOL, "unpin_blocks", ("blocks",), "that a connector gave back blocks it had pinned", since="0.30"),
    Hook(
        GROUP_MANAGER,
        "_apply_cow",
        ("request_id", "source_block", "cow_block"),
        "copies of blocks that were hit in part",
        since="0.26",
    ),
    Hook(FRONT_END, "add_request", ("request",), "requests that the API server has received"),
    Hook(FRONT_END, "abort_requests", ("request_ids",), "clients that have gone"),
    Hook(FRONT_END, "_finish_request", ("req_state",), "ends of requests in the API server", since="0.15"),
    Hook(CLIENT, "__init__", (), "the ranks of an API server"),
    Hook(BALANCING_CLIENT, "get_core_engine_for_request", ("request",), "the rank that the API server chose"),
)


class Imported:
    """The vLLM of this Python."""

    def arguments(self, place: str, method: str) -> Iterable[str]:
        """As it can be called."""
        return inspect.signature(getattr(self._kind(place), method)).parameters

    def written(self, place: str) -> ast.ClassDef:
        """As Python finds its source."""
        return _class(ast.parse(textwrap.dedent(inspect.getsource(self._kind(place)))), place)

    def _kind(self, place: str) -> Any:
        module, _, name = place.partition(":")
        return getattr(importlib.import_module(module), name)


class Unpacked:
    """The source of a release, of which nothing is run: `root` is the folder that has the package `vllm`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def arguments(self, place: str, method: str) -> Iterable[str]:
        """As they are written."""
        for one in self.written(place).body:
            if isinstance(one, ast.FunctionDef) and one.name == method:
                return [argument.arg for argument in (*one.args.args, *one.args.kwonlyargs)]
        raise AttributeError(f"{place.partition(':')[2]} has no {method}")

    def written(self, place: str) -> ast.ClassDef:
        """From the file that the place names."""
        module = place.partition(":")[0]
        try:
            text = (self._root / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
        except OSError as error:
            raise ImportError(f"no module {module}") from error
        return _class(ast.parse(text), place)


def _class(tree: ast.Module, place: str) -> ast.ClassDef:
    module, _, name = place.partition(":")
    for kind in ast.walk(tree):
        if isinstance(kind, ast.ClassDef) and kind.name == name:
            return kind
    raise AttributeError(f"{module} has no {name}")


def problem(hook: Hook, release: HookedRelease | None = None) -> str:
    """Return the problem with it in that vLLM, or else in the one of this Python, or an empty string."""
    release = release or Imported()
    try:
        there = release.arguments(hook.place, hook.method)
    except (ImportError, AttributeError) as error:
        return "" if hook.instead is not None and hook.instead(release) else str(error)
    absent = [argument for argument in hook.arguments if argument not in there]
    return f"it takes no {', '.join(absent)}" if absent else ""


def main() -> int:
    """Print the result, a line a hook. Return the exit code."""
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
        moved = hook.instead is not None and hook.instead(Imported())
        elsewhere = ": done elsewhere, where the probe sees it" if moved else ""
        print(f": {wrong}; not reported: {hook.not_reported}" if wrong else elsewhere)
    found = any(point.name == "kvscope" for point in entry_points(group=GROUP))
    allowed = os.environ.get("VLLM_PLUGINS")
    left_out = allowed is not None and "kvscope" not in allowed.split(",")
    if not found:
        remedy = "pip install its wheel or checkout"
        print(f"  MISSING the plugin: kvscope is not installed there (entry point {GROUP}): {remedy}")
    elif left_out:
        print(f"  MISSING the plugin: VLLM_PLUGINS is {allowed!r} and leaves kvscope out")
    if needed or not found or left_out:
        return MISSING
    print("The probe works with it. KVSCOPE_EVENTS=tcp://127.0.0.1:5757 in vLLM's environment switches it on.")
    return OK


if __name__ == "__main__":
    sys.exit(main())
