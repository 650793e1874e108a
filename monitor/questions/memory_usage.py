"""The breakdown of a device's memory, the blocks that a load needs, and the plan of an engine that runs."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Final

from ..base.errors import BadQuestion, NotKnown
from ..base.text import counted, percent, timestamp
from ..ledger.engine_ledger import EngineLedger
from ..ledger.memory_breakdown import NoBreakdown, blocks_of_request, breakdown_of, measured, parts, unnamed
from ..ledger.pool_account import share_of_pool
from ..planning.kv_pool import RESERVED_NULL_BLOCKS, CacheGroup, KvPool
from ..planning.model_shape import CacheKind
from ..planning.plan_request import DEFAULT_RELEASE_OF_PLAN, MeasuredLoad, PlanRequest, RunningPool, plan_from_request
from ..planning.plan_types import CapacityPlan
from .availability import need_of
from .schema import CalculatorView, MemoryView

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
        usable_blocks=state.usable,
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
        raise NotKnown(f"{ledger.engine}: {need_of('memory')}") from None
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
    block_size, usable = state.block_size, state.usable
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
    if held := share_of_pool(state.used, usable):
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
        share=share_of_pool(each * concurrency, usable),
        fits=concurrency <= most,
        max_concurrency=most,
        notes=notes,
    )


# -------------------------------------------------------------------- the plan


FEWEST_REQUESTS: Final = 1
STATES_PER_REQUEST: Final = {False: 1, True: 2}
"""Blocks of a state, by whether prefixes are cached (vLLM from 0.29 on)."""
ROUNDED: Final = 1e-6
"""In tokens: the possible error of a division of floating-point numbers."""


def running_pool(ledger: EngineLedger) -> RunningPool:
    """Return the engine's pool. Raises NotKnown where nothing states its blocks and their size."""
    return _described_pool(ledger) if ledger.has_stream else _exposed_pool(ledger)


def plan_of_engine(ledger: EngineLedger, request: PlanRequest) -> CapacityPlan:
    """Return the plan, with what the engine states and what was measured of it. Raises BadQuestion and NotKnown."""
    try:
        running = running_pool(ledger)
    except NotKnown:
        if not (request.model or request.layers):
            raise
        running = None
    load = _load_of_stream(ledger) if ledger.has_stream else _load_of_samples(ledger)
    return plan_from_request(request, running=running, measured=load)


def _described_pool(ledger: EngineLedger) -> RunningPool:
    state, described = ledger.state, ledger.description
    if not state.block_size or not state.total:
        raise NotKnown(f"{ledger.engine} does not state its blocks and their size")
    kept = STATES_PER_REQUEST[described.enable_prefix_caching]
    groups = tuple(_group(group.kind, group.layers, group.window, state.block_size, kept) for group in described.groups)
    whole = CacheGroup(kind=CacheKind.FULL, layers=1, block_size=state.block_size)
    per_block = described.kv_bytes_per_block
    return RunningPool(
        model=described.served_model_name or described.model,
        release=_release_of(described.version),
        pool=KvPool(
            groups=groups or (whole,),
            bytes_per_block=per_block,
            block_size=state.block_size,
            in_flight=described.max_num_batched_tokens,
        ),
        blocks=state.total,
        max_model_len=described.max_model_len or state.total * state.block_size,
        max_num_seqs=described.max_num_seqs,
        max_num_batched_tokens=described.max_num_batched_tokens,
        kv_bytes=state.total * per_block or None,
        assumed=() if described.max_model_len else (_unlimited(state.total * state.block_size),),
    )


def _group(kind: str, layers: int, window: int, block_size: int, kept: int) -> CacheGroup:
    if "mamba" in kind.lower() or "state" in kind.lower():
        return CacheGroup(kind=CacheKind.STATE, layers=layers, block_size=block_size, state_blocks=kept)
    if "chunk" in kind.lower() and window:
        return CacheGroup(kind=CacheKind.CHUNK, layers=layers, block_size=block_size, reach=window)
    reach = CacheKind.WINDOW if window else CacheKind.FULL
    return CacheGroup(kind=reach, layers=layers, block_size=block_size, reach=window)


def _exposed_pool(ledger: EngineLedger) -> RunningPool:
    """Return the pool of a plain vLLM, by its metrics or its log: full attention in every layer is assumed."""
    size, blocks = _whole_fact(ledger, "block_size"), _whole_fact(ledger, "num_gpu_blocks")
    tokens = _whole_fact(ledger, "kv_cache_size_tokens")
    blocks = blocks or _whole_fact(ledger, "num_gpu_blocks_override")
    if not blocks and tokens and size:
        blocks = tokens // size
    if not (blocks and size):
        raise NotKnown(f"{ledger.engine}: {need_of('plan')}")
    length = _whole_fact(ledger, "max_model_len") or _whole_fact(ledger, "max_concurrency_tokens") or _length(ledger)
    most = (blocks - 1) * size  # block 0 is vLLM's own
    fact = ledger.facts.get("served_model_name") or ledger.facts.get("model")
    version = ledger.facts.get("version")
    assumed = () if tokens and tokens == blocks * size else ("every layer has full attention (metrics do not show it)",)
    return RunningPool(
        model=str(fact.value) if fact is not None else "",
        release=_release_of(str(version.value)) if version is not None else DEFAULT_RELEASE_OF_PLAN,
        pool=KvPool(
            groups=(CacheGroup(kind=CacheKind.FULL, layers=1, block_size=size),),
            bytes_per_block=0,
            block_size=size,
            in_flight=0,
        ),
        blocks=blocks,
        max_model_len=length or most,
        max_num_seqs=_whole_fact(ledger, "max_num_seqs") or 0,
        assumed=assumed if length else (*assumed, _unlimited(most)),
    )


def _length(ledger: EngineLedger) -> int:
    """Return max_model_len by what vLLM exposes, 0 if it does not.

    Source: vLLM's get_kv_cache_capacity, kv_cache_size_tokens = int(kv_cache_max_concurrency * max_model_len).
    """
    tokens, concurrency = (ledger.facts.get(name) for name in ("kv_cache_size_tokens", "max_concurrency"))
    if tokens is None or concurrency is None:
        return 0
    try:
        return math.ceil(float(tokens.value) / float(concurrency.value) - ROUNDED)
    except (ValueError, ZeroDivisionError, OverflowError):  # OverflowError: of an infinite number
        return 0


def _unlimited(tokens: int) -> str:
    return f"a request has up to {tokens:,} tokens, the whole pool"


def _load_of_stream(ledger: EngineLedger) -> MeasuredLoad | None:
    ended = [request for request in ledger.ended if request.prompt_tokens and request.output_tokens]
    running = max([_most_at_once(ledger), *(point.running for point in ledger.points)])
    if len(ended) < FEWEST_REQUESTS and not running:
        return None
    totals = ledger.state.totals
    count = len(ended)
    return MeasuredLoad(
        source="the event stream",
        requests=count,
        prompt_len=round(sum(one.prompt_tokens for one in ended) / count) if count else None,
        output_len=round(sum(one.output_tokens for one in ended) / count) if count else None,
        hit_rate=totals.hit_tokens / totals.looked_up_tokens if totals.looked_up_tokens else None,
        peak_running=running or None,
        peak_waiting=max((point.waiting for point in ledger.points), default=0),
    )


def _most_at_once(ledger: EngineLedger) -> int:
    """Return the most requests that ran at the same time, of those that ended recently: between points, short ones run
    too.
    """
    ran = [one for one in ledger.ended if one.admitted_ns and one.finished_ns]
    changes = sorted([(one.admitted_ns, 1) for one in ran] + [(one.finished_ns, -1) for one in ran])
    return max(accumulate((change for _, change in changes), initial=0))


def _load_of_samples(ledger: EngineLedger) -> MeasuredLoad | None:
    samples = ledger.samples
    if not samples:
        return None
    last = samples[-1]
    counted = last.measured_requests or 0
    prompts, outputs = last.request_prompt_tokens, last.request_output_tokens
    return MeasuredLoad(
        source="the engine's log" if last.source == "log" else "the engine's metrics",
        requests=counted,
        prompt_len=round(prompts / counted) if counted and prompts else None,
        output_len=round(outputs / counted) if counted and outputs else None,
        hit_rate=last.prefix_hit_rate,
        peak_running=max((sample.running for sample in samples if sample.running is not None), default=None),
        peak_waiting=max((sample.waiting for sample in samples if sample.waiting is not None), default=None),
    )


def _whole_fact(ledger: EngineLedger, name: str) -> int | None:
    fact = ledger.facts.get(name)
    return None if fact is None or isinstance(fact.value, str) else round(fact.value)


def _release_of(version: str) -> tuple[int, int]:
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return DEFAULT_RELEASE_OF_PLAN
    return int(parts[0]), int(parts[1])
