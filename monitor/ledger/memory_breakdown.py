"""The memory bill: what a device's memory went to, what that leaves for KV, and what one request takes of it.

The engine prints sums of its own. This module computes them again from its numbers alone, which reveals wrong advice:
vLLM 0.27 to 0.33 subtract the memory of graphs twice (https://github.com/vllm-project/vllm/issues/57936).

    fit_requested = requested           - weights - activations - non-torch - graphs - headroom
    use_all       = free at the start   - weights - activations - non-torch - graphs - headroom

A suggestion is never negative: where nothing is left it is 0, and `short_by` is the missing amount.

Where a log or report states only a part of the bill, two equations narrow what the rest can be:

    requested = device * share
    requested = weights + activations + non-torch (+ graphs, where the release counts them) + KV cache

Printed sizes are rounded to 0.01 GiB, so each is an interval. Releases of vLLM differ in whether the pool leaves room
for CUDA graphs (`graph_accounting`), and sizes that cannot all be right are reported (`size_contradictions`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from ..base.errors import KvscopeError
from ..contract.description import EngineDescription
from ..contract.kinds import SCHEMA, Kind
from ..contract.samples import Fact
from .demand import number_fact


def blocks_of_request(tokens: int, block_size: int, described: EngineDescription) -> int:
    """Return the blocks that a request of so many tokens has at its peak, in all KV groups, as engines count them.

    In a group that is ⌈tokens / block size⌉. In one with a sliding window it is at most
    ⌈(window + tokens of a step - 2) / block size⌉ + 1: what the window reaches back from the first token of a step,
    with all that the step computes, wherever that begins in a block.
    """
    blocks = -(-tokens // block_size)
    step = described.max_num_batched_tokens
    most = [
        -(-(group.window + step - 2) // block_size) + 1 if group.window and step else blocks
        for group in described.groups
    ]
    return sum(min(blocks, bound) for bound in most) if most else blocks


GIB_B: Final = 1 << 30
HEADROOM: Final = 150 << 20
"""Kept free in both suggestions, as vLLM keeps it."""
ROUNDED_TO: Final = 0.01
"""GiB: what a log's figures are rounded to."""
BILL: Final = {
    "memory_total_gib": "Free memory on device (…/… GiB) on startup",
    "memory_free_gib": "Free memory on device (…/… GiB) on startup",
    "memory_requested_gib": "Desired GPU memory utilization is (…, … GiB)",
    "memory_weights_gib": "Actual usage is … GiB for weight (or: for consumed memory)",
    "memory_activations_gib": "… GiB for peak activation",
    "memory_graphs_gib": "… GiB for CUDAGraph memory",
}
"""The facts that there must be for a bill, and the words of the log that have them."""

GRAPH_ESTIMATE: Final = ("memory_graphs_estimated_gib", "memory_graphs_are_reserved")
"""Facts of a breakdown that stand on lines of their own."""
BY_TORCH: Final = ("weights", "activations_peak", "graphs_actual", "kv_pool")
"""The terms of a MEMORY event that add up to torch's memory, where its allocator does not report it."""


class NoBreakdown(KvscopeError):
    """The log has no bill, or not all of it. `missing`: the words that were looked for and not found."""

    def __init__(self, missing: Sequence[str]) -> None:
        super().__init__("; ".join(missing))
        self.missing = list(missing)


class MeasuredMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. `non_torch` is None where the engine counts it with the weights, `kv_cache` where it does not report
    it.
    """

    device_total: int
    free_at_start: int
    requested: int
    weights: int
    activations: int
    non_torch: int | None
    graphs: int
    kv_cache: int | None

    @property
    def without_kv(self) -> int:
        """The engine's need besides KV, with graphs counted once."""
        return self.weights + self.activations + (self.non_torch or 0) + self.graphs


class Suggestion(msgspec.Struct, frozen=True):
    """A `--kv-cache-memory` in bytes, and by how many bytes it is missed if there is none."""

    kv_cache_memory: int
    short_by: int


def fit_requested(breakdown: MeasuredMemory) -> Suggestion:
    """KV that keeps the engine within the share it was given."""
    return _suggest(breakdown.requested, breakdown)


def use_all(breakdown: MeasuredMemory) -> Suggestion:
    """KV that takes all that was free on the device before the engine came."""
    return _suggest(breakdown.free_at_start, breakdown)


def _suggest(within: int, breakdown: MeasuredMemory) -> Suggestion:
    left = within - breakdown.without_kv - HEADROOM
    return Suggestion(max(left, 0), max(-left, 0))


def parts(breakdown: MeasuredMemory) -> dict[str, int]:
    """Return the device's memory by use. The parts add up to its total. The unexplained rest is `left free`.

    `left free` below 0 is the one figure here that can be: the engine took more than the device had at its start.
    """
    sizes = {
        "in use before": breakdown.device_total - breakdown.free_at_start,
        "weights" if breakdown.non_torch is not None else "weights and non-torch": breakdown.weights,
        "peak activations": breakdown.activations,
        **({"non-torch": breakdown.non_torch} if breakdown.non_torch is not None else {}),
        "graphs": breakdown.graphs,
        **({"KV cache": breakdown.kv_cache} if breakdown.kv_cache is not None else {}),
    }
    rest = "left free" if breakdown.kv_cache is not None else "KV cache and left free"
    return sizes | {rest: breakdown.device_total - sum(sizes.values())}


def over_requested(breakdown: MeasuredMemory) -> int | None:
    """Return the bytes by which the engine with its KV exceeds the share it was given, or a negative number within it.
    None if it was not reported.
    """
    return None if breakdown.kv_cache is None else breakdown.without_kv + breakdown.kv_cache - breakdown.requested


def rounding(breakdown: MeasuredMemory) -> int:
    """Bytes by which a suggestion may be off because the figures were printed rounded: half a step for each."""
    figures = 4 + (breakdown.non_torch is not None)
    return round(figures * ROUNDED_TO / 2 * GIB_B)


def breakdown_of(facts: Iterable[Fact]) -> tuple[MeasuredMemory, list[str]]:
    """Return the last breakdown among a log's facts, with notes on how to read it. Raises NoBreakdown."""
    printed = list(facts)
    line = next((fact.position for fact in reversed(printed) if fact.name == "memory_total_gib"), "")
    figures = {fact.name: fact.value for fact in printed if fact.position == line or fact.name in GRAPH_ESTIMATE}
    sized = {name: round(float(value) * GIB_B) for name, value in figures.items() if name.endswith("_gib")}
    together = "memory_consumed_gib" in sized
    missing = [words for name, words in BILL.items() if name not in sized and not (together and "weights" in name)]
    if not together and "memory_weights_gib" in sized and "memory_non_torch_gib" not in sized:
        missing.append("… GiB for non-torch memory")
    if missing:
        raise NoBreakdown(list(dict.fromkeys(missing)))
    activations, notes = _without_graphs(sized, figures, together)
    in_use = figures.get("kv_cache_in_use_bytes")
    breakdown = MeasuredMemory(
        device_total=sized["memory_total_gib"],
        free_at_start=sized["memory_free_gib"],
        requested=sized["memory_requested_gib"],
        weights=sized["memory_consumed_gib" if together else "memory_weights_gib"],
        activations=activations,
        non_torch=None if together else sized["memory_non_torch_gib"],
        graphs=max(sized["memory_graphs_gib"], 0),
        kv_cache=int(in_use) if in_use is not None else sized.get("kv_cache_in_use_gib"),
    )
    lines = len({fact.position for fact in printed if fact.name == "memory_total_gib"})
    if lines > 1:
        notes.append(f"the log has {lines} memory breakdowns, from several workers or starts. This is the last")
    return breakdown, notes


def _without_graphs(sized: Mapping[str, int], figures: Mapping[str, object], together: bool) -> tuple[int, list[str]]:
    """Return the peak of activations alone, with notes. Since 0.27 vLLM prints it with its estimate of the graphs, if
    it made one.
    """
    peak, estimate = sized["memory_activations_gib"], sized.get("memory_graphs_estimated_gib")
    reserved = "memory_graphs_are_reserved" in figures
    if together and reserved and estimate is not None and estimate <= peak:
        return peak - estimate, [
            f"the printed peak of activations holds the estimate of the graphs, {estimate / GIB_B:.2f} GiB, which is"
            " taken out of it here, so that graphs count once"
        ]
    if together and estimate is None and sized["memory_graphs_gib"] > 0:
        return peak, [
            "the printed peak of activations may hold an estimate of the graphs, which would then count twice: the log"
            ' lacks "Estimated CUDA graph memory: … GiB total", which would show it'
        ]
    return peak, []


def measured(figures: Sequence[int]) -> dict[str, int]:
    """Return the known numbers of a MEMORY event by name, and `elsewhere` if the device's own are known.

    elsewhere: bytes in use on the device that the bill does not name: another process, or what was never counted.
    """
    known = {name: value for name, value in zip(SCHEMA[Kind.MEMORY].args, figures, strict=False) if value >= 0}
    if "device_total" not in known or "device_free" not in known:
        return known
    by_torch = known.get("allocator_reserved", sum(known.get(name, 0) for name in BY_TORCH))
    in_use = known["device_total"] - known["device_free"]
    return known | {"elsewhere": max(in_use - by_torch - known.get("non_torch", 0), 0)}


def unnamed(known: Mapping[str, int]) -> int | None:
    """Bytes that no line of a MEMORY event's bill accounts for: `elsewhere`, and what torch has handed out beyond the
    bill's parts. None where the bill, or the device's figure, is not whole.
    """
    if "elsewhere" not in known or any(known.get(name, -1) < 0 for name in ("weights", "activations_peak", "kv_pool")):
        return None
    within = known.get("allocator_allocated", 0) - sum(known.get(name, 0) for name in BY_TORCH)
    return known["elsewhere"] + max(within, 0)


TermState = Literal["stated", "follows", "missing"]
TERM_FACTS: Final[dict[str, tuple[str, ...]]] = {
    "device": ("memory_total_gib",),
    "requested": ("memory_requested_gib",),
    "free at the start": ("memory_free_gib",),
    "weights": ("memory_weights_gib", "model_loading_gib"),
    "weights and non-torch": ("memory_consumed_gib",),
    "peak activations": ("memory_activations_gib",),
    "non-torch": ("memory_non_torch_gib",),
    "graphs": ("memory_graphs_gib", "graph_capture_gib", "memory_graphs_estimated_gib"),
    "KV cache": (
        "kv_cache_in_use_bytes",
        "kv_cache_in_use_gib",
        "available_kv_cache_gib",
        "kv_cache_reserved_gib",
        "kv_cache_memory_bytes",
    ),
}
"""The facts of a log that state each term, the most exact first."""
SETS_THE_POOL: Final = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
"""With either of these the pool is not what the share leaves."""
ROUNDS: Final = 6
"""Both equations settle in fewer."""
NARROW: Final = round(0.08 * GIB_B)
"""An interval this narrow follows: the widest that rounding alone makes is 0.06 GiB."""


class MemoryTerm(msgspec.Struct, frozen=True, kw_only=True):
    """A term of the breakdown, in bytes. `high` is null where nothing bounds it from above."""

    name: str
    state: TermState
    low: int
    high: int | None


class _Bounds:
    """An interval that only becomes narrower."""

    def __init__(self, low: float = 0, high: float = float("inf")) -> None:
        self.low, self.high = low, high

    def narrow(self, low: float, high: float) -> None:
        low, high = max(self.low, low), min(self.high, high)
        if low <= high:  # figures that contradict each other narrow nothing
            self.low, self.high = low, high


def breakdown_terms(facts: Iterable[Fact], are_graphs_counted: bool) -> list[MemoryTerm]:
    """Return every term: stated, following from the others, or missing with its bounds. Empty if none is stated."""
    values = {fact.name: fact.value for fact in facts}
    stated = {name: bounds for name, sources in TERM_FACTS.items() if (bounds := _stated(values, sources)) is not None}
    if not stated:
        return []
    terms = {name: stated.get(name, _Bounds()) for name in TERM_FACTS}
    members = _members(stated, are_graphs_counted)
    share = values.get("memory_requested_share", values.get("gpu_memory_utilization"))
    pool_is_set = any(name in values for name in SETS_THE_POOL)
    for _ in range(ROUNDS):
        if isinstance(share, int | float) and 0 < share <= 1:
            _product(terms["requested"], terms["device"], float(share))
        terms["requested"].narrow(0, terms["device"].high)
        terms["free at the start"].narrow(0, terms["device"].high)
        if not pool_is_set:
            _sum(terms["requested"], [terms[name] for name in members])
        if not are_graphs_counted:  # they are captured on top of the share, and fitted if the engine started
            terms["graphs"].narrow(0, terms["device"].high - terms["requested"].low)
    shown = [name for name in TERM_FACTS if name in members or name in ("device", "requested", "free at the start")]
    shown += [name for name in TERM_FACTS if name not in shown and name in {"graphs", *stated}]
    return [_term(name, terms[name], name in stated) for name in shown]


def stated_bytes(facts: Mapping[str, Fact], term: str) -> int | None:
    """Return what the text states for the term, in bytes, or None if it does not."""
    bounds = _stated({name: fact.value for name, fact in facts.items()}, TERM_FACTS[term])
    return None if bounds is None else round((bounds.low + bounds.high) / 2)


def _members(stated: Mapping[str, _Bounds], are_graphs_counted: bool) -> list[str]:
    """Return the terms whose sum is the requested memory."""
    resident = ["weights and non-torch"] if "weights and non-torch" in stated else ["weights", "non-torch"]
    return [*resident, "peak activations", *(["graphs"] if are_graphs_counted else []), "KV cache"]


def _stated(values: Mapping[str, object], sources: tuple[str, ...]) -> _Bounds | None:
    for name in sources:
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name.endswith("_bytes"):
            return _Bounds(value, value)
        half = ROUNDED_TO / 2 * GIB_B
        return _Bounds(max(0.0, value * GIB_B - half), value * GIB_B + half) if value >= 0 else None
    return None


def _product(requested: _Bounds, device: _Bounds, share: float) -> None:
    requested.narrow(device.low * share, device.high * share)
    device.narrow(requested.low / share, requested.high / share)


def _sum(total: _Bounds, members: list[_Bounds]) -> None:
    total.narrow(sum(one.low for one in members), sum(one.high for one in members))
    for one in members:
        others = [other for other in members if other is not one]
        one.narrow(total.low - sum(other.high for other in others), total.high - sum(other.low for other in others))


def _term(name: str, bounds: _Bounds, is_stated: bool) -> MemoryTerm:
    high = None if bounds.high == float("inf") else round(bounds.high)
    is_narrow = high is not None and high - bounds.low <= NARROW
    state: TermState = "stated" if is_stated else "follows" if is_narrow else "missing"
    return MemoryTerm(name=name, state=state, low=round(bounds.low), high=high)


OPTIONAL_SINCE: Final = (0, 18, 0)
"""With VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1."""
COUNTED_SINCE: Final = (0, 20, 2)
TWICE_SINCE: Final = (0, 27, 0)
"""Its suggestions subtract graphs a second time (https://github.com/vllm-project/vllm/issues/57936)."""
NEWEST_SEEN: Final = (0, 33)
_RELEASE: Final = re.compile(r"v?(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?")


class GraphAccounting(NamedTuple):
    """`in_pool`: the pool leaves room for graphs, or None where the text does not show it. `sentence` is the same for a
    reader.
    """

    in_pool: bool | None
    sentence: str


def graph_accounting(facts: Mapping[str, Fact]) -> GraphAccounting:
    """Return how the release that the text names counts graphs, or what the wording shows without a release."""
    if "enforce_eager" in facts and str(facts["enforce_eager"].value) == "True":
        return GraphAccounting(False, "no graphs are captured: the engine runs with --enforce-eager")
    is_reserved = "memory_graphs_are_reserved" in facts
    release = release_in(facts)
    if release is None:
        return _by_wording(facts, is_reserved)
    name = "vLLM " + ".".join(map(str, release))
    if release < OPTIONAL_SINCE or (release < COUNTED_SINCE and not is_reserved):
        unless = "" if release < OPTIONAL_SINCE else ", unless VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1"
        return GraphAccounting(
            False, f"{name} does not count graphs: it captures them after sizing the pool, on top of the share{unless}"
        )
    if release < COUNTED_SINCE or release >= TWICE_SINCE:
        newest = f" (seen up to {'.'.join(map(str, NEWEST_SEEN))})" if release >= TWICE_SINCE else ""
        return GraphAccounting(
            True,
            f"{name} counts graphs once in the pool, and twice in the --kv-cache-memory that it suggests{newest}",
        )
    return GraphAccounting(
        True, f"{name} counts graphs once, in the pool and in the --kv-cache-memory that it suggests"
    )


def release_in(facts: Mapping[str, Fact]) -> tuple[int, int, int] | None:
    """Return the release that the text states, None if it states none."""
    found = _RELEASE.match(str(facts["version"].value)) if "version" in facts else None
    if found is None:
        return None
    major, minor, patch = (int(part or 0) for part in found.groups())
    return major, minor, patch


def _by_wording(facts: Mapping[str, Fact], is_reserved: bool) -> GraphAccounting:
    if "memory_consumed_gib" in facts:
        return GraphAccounting(
            True,
            "the text has the wording of vLLM 0.27 and later, which counts graphs once in the pool, and twice in the"
            " --kv-cache-memory that it suggests",
        )
    if is_reserved:
        return GraphAccounting(
            True, "graphs are counted in the pool, because the log reports that their profiling is enabled"
        )
    if "memory_weights_gib" in facts and "kv_cache_reserved_gib" in facts:
        return GraphAccounting(
            False,
            "the text has the wording of vLLM before 0.9, which does not count graphs: they come on top of the share",
        )
    return GraphAccounting(
        None,
        "the text does not name the release: vLLM before 0.20.2 leaves graphs out of the pool, later ones count them",
    )


HALF_A_HUNDREDTH: Final = 0.005
"""Concurrency is printed with two decimals."""
RESIDENT: Final = ("weights", "non-torch")


def size_contradictions(facts: Mapping[str, Fact], are_graphs_counted: bool) -> list[str]:
    """Return a sentence for each pair of sizes that differ by more than their rounding."""
    return [
        *_tokens_and_concurrency(facts),
        *_blocks_and_tokens(facts),
        *_share_gap(facts),
        *_profile_gap(facts, are_graphs_counted),
    ]


def _tokens_and_concurrency(facts: Mapping[str, Fact]) -> Iterator[str]:
    tokens, times = number_fact(facts, "kv_cache_size_tokens"), number_fact(facts, "max_concurrency")
    each = number_fact(facts, "max_concurrency_tokens")
    if not (tokens and times and each):
        return
    slack = each * HALF_A_HUNDREDTH + max(number_fact(facts, "block_size") or 0, tokens * HALF_A_HUNDREDTH)
    if abs(times * each - tokens) > slack:
        yield (
            f"{times:g} requests of {each:,.0f} tokens are {times * each:,.0f} tokens, and the engine prints"
            f" {tokens:,.0f}: vLLM before 0.20 divides the tokens of a model with several KV cache groups by their"
            " number. Plan with the concurrency"
        )


def _blocks_and_tokens(facts: Mapping[str, Fact]) -> Iterator[str]:
    blocks = number_fact(facts, "num_gpu_blocks_override") or number_fact(facts, "num_gpu_blocks")
    size, tokens = number_fact(facts, "block_size"), number_fact(facts, "kv_cache_size_tokens")
    if blocks and size and tokens and abs(blocks * size - tokens) > max(size, tokens * HALF_A_HUNDREDTH):
        yield (
            f"{blocks:,.0f} blocks of {size:,.0f} tokens are {blocks * size:,.0f} tokens, and the engine prints"
            f" {tokens:,.0f}: with several KV cache groups a request takes blocks in each of them, and a block with"
            " room for a state has more tokens than --block-size"
        )


def _share_gap(facts: Mapping[str, Fact]) -> Iterator[str]:
    device, requested = number_fact(facts, "memory_total_gib"), number_fact(facts, "memory_requested_gib")
    share = number_fact(facts, "memory_requested_share")
    if device and requested and share and abs(device * share - requested) > ROUNDED_TO * 2 + HALF_A_HUNDREDTH * device:
        yield (
            f"{share:g} of {device:.2f} GiB are {device * share:.2f} GiB, and the engine prints {requested:.2f}: the"
            " lines may be from two devices"
        )


def _profile_gap(facts: Mapping[str, Fact], are_graphs_counted: bool) -> Iterator[str]:
    if any(name in facts for name in SETS_THE_POOL):
        return
    resident = stated_bytes(facts, "weights and non-torch")
    parts: list[int | None] = [resident] if resident is not None else [stated_bytes(facts, name) for name in RESIDENT]
    parts.append(stated_bytes(facts, "peak activations"))
    if are_graphs_counted and resident is None:  # from 0.27 on the printed activations contain the estimate
        parts.append(stated_bytes(facts, "graphs"))
    requested, available = stated_bytes(facts, "requested"), stated_bytes(facts, "KV cache")
    taken = [size for size in parts if size is not None]
    if requested is None or available is None or len(taken) < len(parts):
        return
    left = requested - sum(taken)
    if abs(left - available) > (len(parts) + 2) * ROUNDED_TO * GIB_B:
        yield (
            f"the profile leaves {left / GIB_B:.2f} GiB of the {requested / GIB_B:.2f} GiB requested, and the engine"
            f" prints {available / GIB_B:.2f} GiB for KV: the lines may be from two workers or two starts"
        )
