"""The plan's numbers for a start that was refused, or for a pool that was advised, as far as the text states enough."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...contract.samples import ReportedEvent
from ...planning.known_models import KnownModel, known_model
from ...planning.plan_types import GIB_BYTES
from ...planning.start_remedies import RefusedNumbers, pool_sentence, start_remedies
from .written_view import WrittenView, line_number, number_of

DEFAULT_RELEASE: Final = (0, 33)
EIGHT_BIT_DTYPES: Final = ("fp8", "fp8_e4m3", "fp8_e5m2")
DEFAULT_SHARE: Final = 0.9
"""The default of vLLM up to 0.31."""
MOST_SHARES: Final = 2


def remedies_of(view: WrittenView, line: ReportedEvent) -> tuple[str, ...]:
    """Return what would have started, from the refusal's line and the memory profile above it."""
    device = number_of(line, "total_gib") or view.number("memory_total_gib")
    share = number_of(line, "share") or view.number("memory_requested_share") or view.number("gpu_memory_utilization")
    requested = number_of(line, "desired_gib") or view.number("memory_requested_gib")
    if requested is None and device is not None and share is not None:
        requested = device * share
    available = number_of(line, "available_gib")
    is_pool_empty = line.name == "refused_without_pool"
    if available is None and is_pool_empty:
        available = number_of(line, "pool_gib") or _left_for_pool(view, requested)
    dtype = view.facts.get("kv_cache_dtype")
    return start_remedies(
        RefusedNumbers(
            length=_whole(number_of(line, "max_len")),
            needed=number_of(line, "needed_gib"),
            available=available,
            pool_tokens=_whole(number_of(line, "pool_tokens")),
            fitting=_whole(number_of(line, "fitting_len")),
            device=device,
            requested=requested,
            share=share,
            free=number_of(line, "free_gib") if line.name == "refused_for_other_processes" else None,
            is_eight_bit=dtype is not None and str(dtype.value) in EIGHT_BIT_DTYPES,
            is_pool_empty=is_pool_empty,
        )
    )


def planned_pool(view: WrittenView, kv_bytes: int, position: str) -> tuple[str, ...]:
    """Return the pool of so many bytes for the model that is named nearest above `position`."""
    named = nearest_model(view, position)
    if named is None:
        return (f"`monitor plan MODEL --kv-cache-memory {kv_bytes}` shows the tokens and requests that this holds.",)
    sentence = pool_sentence(named[0], named[1], kv_bytes, release_of(view))
    return (sentence,) if sentence else ()


def planned_shares(view: WrittenView) -> tuple[str, ...]:
    """Return the plan's command for each share of the device that the text names beside a known model."""
    named = nearest_model(view, "")
    if named is None:
        return ()
    name, model = named
    named_shares = [share for line in view.reported.of("share_named") if (share := number_of(line, "share"))]
    shares = list(dict.fromkeys([*named_shares[: MOST_SHARES - 1], DEFAULT_SHARE]))
    device = view.number("memory_total_gib")
    if device is None:
        flags = " and ".join(f"--gpu-memory-utilization {share:.2f}" for share in shares)
        return (
            f"Plan for {name}: {model.weights / GIB_BYTES:.2f} GiB of weights; the pool follows from the device's"
            f" memory, which the text lacks: `monitor plan {name} --device-memory SIZE` with {flags}.",
        )
    return tuple(_planned_shares(named, device, shares, release_of(view)))


def nearest_model(view: WrittenView, position: str) -> tuple[str, KnownModel] | None:
    """Return the known model that is named last up to `position`, or first after it, and its name."""
    found = [
        (line_number(line.position), str(line.fields["model"]), model)
        for line in view.reported.of("model_named")
        if (model := known_model(str(line.fields.get("model", "")))) is not None
    ]
    if (fact := view.facts.get("model")) is not None and (model := known_model(str(fact.value))) is not None:
        found.append((line_number(fact.position), str(fact.value), model))
    if not found:
        return None
    limit = line_number(position)
    before = [one for one in found if one[0] <= limit]
    _, name, model = max(before, key=lambda one: one[0]) if before else min(found, key=lambda one: one[0])
    return name, model


def release_of(view: WrittenView) -> tuple[int, int]:
    """Return vLLM's release as the text states it, or the newest one that the plan knows."""
    fact = view.facts.get("version")
    parts = str(fact.value).split(".") if fact is not None else []
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return DEFAULT_RELEASE
    return int(parts[0]), int(parts[1])


def _planned_shares(
    named: tuple[str, KnownModel], device: float, shares: list[float], release: tuple[int, int]
) -> Iterator[str]:
    name, model = named
    for share in shares:
        kv_bytes = int(device * share * GIB_BYTES) - model.weights
        if kv_bytes > 0 and (sentence := pool_sentence(name, model, kv_bytes, release)):
            yield f"{sentence} That is a share of {share:.2f} of {device:.2f} GiB, less the weights."


def _left_for_pool(view: WrittenView, requested: float | None) -> float | None:
    """GiB, below 0, by which a whole profile exceeds the share. None where it does not, or is not whole."""
    taken = [view.number(f"memory_{name}_gib") for name in ("weights", "activations", "non_torch")]
    if requested is None or any(size is None for size in taken):
        return None
    left = requested - sum(size for size in taken if size is not None)
    return left if left < 0 else None


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)
