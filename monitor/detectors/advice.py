"""What to set on the engine at hand: its own flags, with values that its own figures ask for."""

from __future__ import annotations

from monitor.ledger.ledger import EngineLedger

DEFAULT_BUDGET = 8192
"""Tokens a step: what serving a stream of unlike requests was seen to do well with."""


def at_hand(ledger: EngineLedger, *, vllm: str, kvscope: str) -> str:
    """The words for this engine; for both kinds where it has not said which it is."""
    if ledger.description.engine == "kvscope":
        return kvscope
    return vllm if ledger.description.engine else f"{vllm} (vLLM), or {kvscope} (kvscope's engine)"


def named(ledger: EngineLedger) -> str:
    """`kvscope 0.1.0`: the engine and its version, as far as they were said."""
    return " ".join(filter(None, (ledger.description.engine, ledger.description.version)))


def smaller_budget(ledger: EngineLedger) -> str:
    """`--max-num-batched-tokens`, and how far down."""
    told = ledger.facts.get("max_num_batched_tokens")
    now = ledger.description.max_num_batched_tokens or (int(told.value) if told is not None else 0)
    if not now:
        return f"--max-num-batched-tokens (to {DEFAULT_BUDGET}, say)"
    return f"--max-num-batched-tokens to {min(DEFAULT_BUDGET, max(now // 2, 1))} (it is {now})"


def room_for(ledger: EngineLedger, blocks: int) -> str:
    """The flag that gives a pool so many blocks, the reserved ones included."""
    each = ledger.description.kv_bytes_per_block
    if not each:
        return "--kv-cache-memory-bytes, a higher --gpu-memory-utilization, no --num-gpu-blocks-override"
    return f"--kv-cache-memory-bytes {blocks * each}, and no --num-gpu-blocks-override"
