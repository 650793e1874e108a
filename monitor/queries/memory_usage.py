"""The breakdown of a device's memory, and the demand of a load on the pool."""

from __future__ import annotations

from kvscope.monitor.analysis.concurrency import blocks_of_request
from kvscope.monitor.analysis.memory_breakdown import NoBreakdown, breakdown_of, measured, parts, unnamed
from kvscope.monitor.errors import BadQuestion, NotKnown
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.planning.kv_pool import RESERVED_NULL_BLOCKS
from kvscope.monitor.queries.running_plan import running_pool
from kvscope.monitor.schema import CalculatorView, MemoryView
from kvscope.monitor.text import counted, percent, timestamp

MAX_ASKED = 1 << 40
"""Tokens of a request, or requests at once, that the calculator takes."""
PARTS = {
    "weights": "weights",
    "activations_peak": "peak activations",
    "graphs_actual": "graphs",
    "non_torch": "non-torch",
    "kv_pool": "KV cache",
}
"""The lines of a MEMORY event's bill, and what each is called."""


def memory_view(ledger: EngineLedger) -> MemoryView:
    """Return the breakdown as the engine measured it last, by its event or its log. Raises NotKnown where it has not
    reported one.
    """
    state = ledger.state
    known = measured(state.memory)
    shown = _device_parts(known)
    if not known:
        known, shown = _in_log(ledger)
    return MemoryView(
        engine=ledger.engine,
        at=timestamp(ledger.now_ns),
        measured=known,
        parts=shown,
        unattributed=unnamed(known),
        kv_bytes_per_block=ledger.description.kv_bytes_per_block,
        block_size=state.block_size,
        usable_blocks=state.total - state.reserved,
    )


def _device_parts(known: dict[str, int]) -> dict[str, int]:
    """Return the device's memory by use. The parts add up to its total, since the unexplained rest is a part too."""
    if "device_total" not in known or "device_free" not in known:
        return {}
    named = {words: known[name] for name, words in PARTS.items() if name in known}
    if "used_by_others" in known:
        named["other processes"] = known["used_by_others"]
    named["free"] = known["device_free"]
    return named | {"not named": known["device_total"] - sum(named.values())}


def _in_log(ledger: EngineLedger) -> tuple[dict[str, int], dict[str, int]]:
    """Return the values of a log, by the names of the event, and the parts."""
    try:
        breakdown, _ = breakdown_of(ledger.facts.values())
    except NoBreakdown:
        raise NotKnown(
            f"{ledger.engine} did not report the memory of its device (a MEMORY event, or the lines in its log)"
        ) from None
    known = {
        "device_total": breakdown.device_total,
        "weights": breakdown.weights,
        "activations_peak": breakdown.activations,
        "non_torch": breakdown.non_torch,
        "graphs_actual": breakdown.graphs,
        "kv_pool": breakdown.kv_cache,
    }
    return {name: size for name, size in known.items() if size is not None}, parts(breakdown)


def calculator_view(ledger: EngineLedger, prompt_tokens: int, max_tokens: int, concurrency: int) -> CalculatorView:
    """Return the concurrency calculator. Raises BadQuestion for lengths that no request has, and NotKnown if the block
    size is not known.
    """
    if prompt_tokens < 1 or max_tokens < 1 or concurrency < 1:
        raise BadQuestion("prompt_tokens, max_tokens and concurrency are each 1 or more")
    if max(prompt_tokens, max_tokens, concurrency) > MAX_ASKED:
        raise BadQuestion(f"prompt_tokens, max_tokens and concurrency are each {MAX_ASKED:,} or less")
    state, described = ledger.state, ledger.description
    block_size, usable = state.block_size, state.total - state.reserved
    if not block_size:
        running = running_pool(ledger)
        block_size, usable = running.pool.block_size, running.blocks - RESERVED_NULL_BLOCKS
    each = blocks_of_request(prompt_tokens + max_tokens, block_size, described)
    by_pool = usable // each
    most = min(by_pool, described.max_num_seqs or by_pool)
    notes = []
    if described.max_model_len and prompt_tokens + max_tokens > described.max_model_len:
        notes.append(
            f"No request may be {counted(prompt_tokens + max_tokens, 'token')} long: max_model_len is"
            f" {described.max_model_len:,}."
        )
    if most < by_pool:
        notes.append(f"The pool has room for {by_pool:,}; max_num_seqs allows {described.max_num_seqs:,}.")
    if any(group.window and not described.max_num_batched_tokens for group in described.groups):
        notes.append(
            "Savings of the sliding window are not included: the engine did not report max_num_batched_tokens."
        )
    if described.enable_prefix_caching:
        notes.append("More requests fit if their prompts share a prefix. This calculation does not assume it.")
    held = state.used / usable if usable else 0.0
    if held:
        notes.append(f"This is for an empty pool. {percent(held)} of it is in use now.")
    return CalculatorView(
        engine=ledger.engine,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        concurrency=concurrency,
        block_size=block_size,
        usable_blocks=usable,
        blocks_per_request=each,
        bytes_per_request=each * described.kv_bytes_per_block or None,
        blocks_needed=each * concurrency,
        share=each * concurrency / usable if usable else None,
        fits=concurrency <= most,
        max_concurrency=most,
        notes=notes,
    )
