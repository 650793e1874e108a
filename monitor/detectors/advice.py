"""Advice for the engine at hand: its own flags, with values that its own numbers require."""

from __future__ import annotations

import re

from ..ledger.engine_ledger import EngineLedger
from .dialects import SGLANG_LOG

DEFAULT_BUDGET = 8192
"""Tokens a step: what serving a stream of unlike requests was seen to do well with."""
SMALLER_BUDGET = f"--max-num-batched-tokens (to {DEFAULT_BUDGET}, say)"
WHOLE_PROMPTS = "--scheduler-reserve-full-isl, which vLLM has since 0.19 and sets by default"
MORE_ROOM = "--kv-cache-memory-bytes, a higher --gpu-memory-utilization, no --num-gpu-blocks-override"
NAMED_SIZE = "the --kv-cache-memory-bytes that the finding names"
"""Phrases of runbooks, for engines about which nothing is known."""


def at_hand(ledger: EngineLedger, *, vllm: str, kvscope: str) -> str:
    """Return the text for this kind of engine, or for both kinds where the kind is unknown."""
    if ledger.description.engine == "kvscope":
        return kvscope
    return vllm if ledger.description.engine else either_kind(vllm=vllm, kvscope=kvscope)


def either_kind(*, vllm: str, kvscope: str) -> str:
    """Return the text for both kinds of engine, as runbooks have it."""
    return f"{vllm} (vLLM), or {kvscope} (kvscope's engine)"


def metrics_dialect(ledger: EngineLedger) -> str:
    """Return the engine that the metrics, or its own lines in a log, are of: vllm, sglang or kvscope."""
    fact = ledger.facts.get("exposition")
    return str(fact.value) if fact is not None else "vllm"


def seen_by(ledger: EngineLedger) -> str:
    """Return what shows the rest where metrics are all there is: the event stream, if this engine can have one."""
    if metrics_dialect(ledger) == "sglang":
        return SGLANG_LOG
    return "attach the event stream (monitor doctor tcp://HOST:5757)"


def them(count: int) -> str:
    """Return the pronoun for so many requests."""
    return "it" if count == 1 else "them"


def named(ledger: EngineLedger) -> str:
    """Return `kvscope 0.1.0`: the engine and its version, as far as they are known."""
    return " ".join(filter(None, (ledger.description.engine, ledger.description.version)))


def release(ledger: EngineLedger) -> tuple[int, int] | None:
    """Return its version as (0, 19), or None if it has not reported one of that form."""
    found = re.match(r"v?(\d+)\.(\d+)", ledger.description.version)
    return (int(found[1]), int(found[2])) if found else None


def whole_prompts_only(ledger: EngineLedger) -> str:
    """Return the flag that admits a prompt only if all of it has room."""
    at, version = release(ledger), ledger.description.version
    if at is None:
        vllm = "--scheduler-reserve-full-isl, which vLLM has since 0.19 and sets by default; upgrade an older release"
    elif at < (0, 19):
        vllm = f"upgrade vLLM {version} to 0.19 or later, where --scheduler-reserve-full-isl is the default"
    else:
        vllm = f"--scheduler-reserve-full-isl, the default of vLLM {version}, which was switched off"
    return at_hand(
        ledger, vllm=vllm, kvscope="kvscope's engine does so by itself, and where it did not that is its defect"
    )


def smaller_budget(ledger: EngineLedger) -> str:
    """`--max-num-batched-tokens`, and how far down."""
    stated = ledger.facts.get("max_num_batched_tokens")
    now = ledger.description.max_num_batched_tokens or (int(stated.value) if stated is not None else 0)
    if not now:
        return SMALLER_BUDGET
    return f"--max-num-batched-tokens to {min(DEFAULT_BUDGET, max(now // 2, 1))} (it is {now})"


def room_for(ledger: EngineLedger, blocks: int) -> str:
    """Return the flag that gives a pool this many blocks, the reserved ones included."""
    each = ledger.description.kv_bytes_per_block
    if not each:
        return MORE_ROOM
    return f"--kv-cache-memory-bytes {blocks * each}, and no --num-gpu-blocks-override"
