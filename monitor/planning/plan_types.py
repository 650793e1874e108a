"""The inputs of a plan, and the plan itself: sizes in bytes, lengths in tokens."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

GIB_BYTES: Final = 1 << 30
OTHER_BYTES: Final = 2 * GIB_BYTES
"""The default for activations, graphs and libraries where nothing was measured. The plan marks it."""
MAX_TOKENS: Final = 1 << 30
InputOrigin = Literal["given", "measured", "model", "assumed"]


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one device. `device` and `weights` are not needed if `kv` is given."""

    device: int | None = None
    free_at_start: int | None = None
    utilization: float = 0.9
    weights: int | None = None
    other: int | None = None
    """Activations, graphs, libraries: everything but weights and KV."""
    kv: int | None = None
    source: str = "assumed"
    """Where weights and `other` come from: measured in a log, or assumed."""


class ExpectedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that are expected, in tokens."""

    prompt: int = 0
    output: int = 0
    shared_prefix: int = 0
    max_model_len: int = 0
    """0: the model's own."""
    max_num_seqs: int = 0
    """0: not limited."""


class PlannedSetting(msgspec.Struct, frozen=True):
    """A flag, the value that follows, why, what it costs, and whether it limits the requests at once."""

    flag: str
    value: str
    why: str
    costs: str = ""
    limits: bool = False


class PlanInput(msgspec.Struct, frozen=True):
    """An input of the plan: given, measured on a running engine (where), from the model, or assumed."""

    name: str
    value: int | float | str
    unit: str
    origin: InputOrigin
    source: str = ""


class LengthPoint(msgspec.Struct, frozen=True):
    """Requests of one length, in tokens, that the pool holds at once."""

    tokens: int
    requests: int


class PlannedGroup(msgspec.Struct, frozen=True):
    """A KV cache group: layers that share a block table."""

    kind: str
    groups: int
    """So many alike."""
    layers: int
    """Layers of the largest of them."""
    block_size: int
    blocks_at_full_length: int


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for one rank. Sizes in bytes, lengths in tokens. Null: not asked for, or not known.

    requests_by_length: how many requests of a length the pool holds at once. inputs: each with its origin.
    """

    schema_version: str = "1.0"
    model: str
    release: str
    kv_bytes: int | None
    device_bytes: int | None
    bytes_per_token: int | None
    """That a long request adds with each token: windows and states add none."""
    bytes_per_block: int | None
    block_size: int
    groups: list[PlannedGroup]
    blocks: int
    usable_blocks: int
    pool_tokens: int
    """As vLLM prints it: "KV cache size"."""
    max_model_len: int
    max_concurrency: float
    """As vLLM prints it: requests of max_model_len at once."""
    longest_request: int
    request_tokens: int | None
    blocks_per_request: int | None
    requests_at_once: int | None
    requests_at_once_sharing: int | None
    limited_by: str | None
    requests_by_length: list[LengthPoint]
    settings: list[PlannedSetting]
    assumed: list[str]
    notes: list[str]
    inputs: list[PlanInput] = []


def plan_schema() -> dict[str, Any]:
    """Return the JSON schema of a CapacityPlan: what plan.schema.json holds."""
    return json_schema(CapacityPlan, "monitor plan --format json")


def json_schema(answer: type[msgspec.Struct], title: str) -> dict[str, Any]:
    """Return the JSON schema of what a command prints, with its own definitions."""
    (described,), components = msgspec.json.schema_components([answer], ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **described,
        "$defs": components,
    }


def planned_size(size: int) -> str:
    """Return a size for a reader."""
    return f"{size / GIB_BYTES:.2f} GiB" if size >= GIB_BYTES // 100 else f"{size:,} bytes"
