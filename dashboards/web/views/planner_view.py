"""The capacity planner: requests at once by length and the settings that follow, for the engine or another model.

Every input is in the address, so a link shares the plan. A field that is empty has the engine's own value, or what was
measured of it, as a placeholder.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from dash import html

from kvscope.monitor.base.errors import BadQuestion, NotKnown
from kvscope.monitor.base.text import counted
from kvscope.monitor.questions.query import Query
from kvscope.monitor.questions.schema import CapacityPlan, PlanInput

from .. import ui
from ..charts import Bar, bars
from ..display_text import sentence
from ..view import Here, PageView
from .memory_view import BYTES_PER_GIB

NAMED_FLAG: Final = re.compile(r"--([a-z-]+)")


class PlannerField(NamedTuple):
    """A field of the form. `input`: the plan's input that fills it where it is empty."""

    name: str
    label: str
    kind: str = "whole"
    input: str = ""


FIELD_GROUPS: Final = (
    (
        "Requests, in tokens",
        (
            PlannerField("prompt_len", "Prompt", input="prompt length"),
            PlannerField("output_len", "Output", input="output length"),
            PlannerField("shared_prefix", "Shared prefix", input="shared prefix"),
        ),
    ),
    (
        "Engine",
        (
            PlannerField("max_model_len", "Max model length", input="longest request allowed"),
            PlannerField("max_num_seqs", "Max sequences", input="sequences allowed"),
            PlannerField("max_num_batched_tokens", "Max batched tokens", input="tokens of a step"),
            PlannerField("block_size", "Block size", input="block size"),
            PlannerField("kv_cache_dtype", "KV dtype", "text"),
            PlannerField("tensor_parallel_size", "Tensor-parallel ranks"),
        ),
    ),
    (
        "Model, if not the engine’s own",
        (
            PlannerField("model", "Name", "text"),
            PlannerField("layers", "Layers"),
            PlannerField("kv_heads", "KV heads"),
            PlannerField("head_dim", "Head size"),
        ),
    ),
    (
        "Memory of one device, in GiB",
        (
            PlannerField("kv_cache_memory", "KV cache", "size", "memory for KV"),
            PlannerField("device_memory", "Device", "size", "device memory"),
            PlannerField("gpu_memory_utilization", "Utilization", "share", "share of the device"),
            PlannerField("weights", "Weights", "size", "weights"),
            PlannerField("other", "Activations and graphs", "size", "other memory"),
        ),
    ),
)
PLANNER_FIELDS: Final = {one.name: one for _, group in FIELD_GROUPS for one in group}


def view(query: Query, here: Here) -> PageView:
    """Return the form, the plan, the chart of concurrency over length, the settings and the inputs."""
    asked, errors = _asked(here)
    plan: CapacityPlan | None = None
    if not errors:
        try:
            plan = query.plan(here.name, **asked)
        except (BadQuestion, NotKnown) as error:
            errors = _at_its_field(str(error))
    sections: dict[str, Any] = {
        "head": html.H1("Capacity planner"),
        "form": ui.card(_form(here, plan, errors), "card planner", label="Inputs of the plan"),
    }
    if plan is not None:
        sections["plan"] = ui.card(_summary(plan), label="The plan")
        sections["lengths"] = ui.card(_chart(plan), label="Concurrency over length")
        sections["settings"] = ui.card(_settings(plan), label="Settings")
        sections["inputs"] = ui.card(_inputs(plan), label="Inputs and origins")
    return PageView(sections)


# -------------------------------------------------------------------- the form


def _asked(here: Here) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the inputs that the address has, and a sentence for each that cannot be read."""
    asked: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, one in PLANNER_FIELDS.items():
        text = here.place.get(name).strip()
        if not text:
            continue
        try:
            asked[name] = FIELD_READERS[one.kind](text)
        except ValueError:
            errors[name] = f"{one.label} is {FIELD_KINDS[one.kind]}, not {text[:40]!r}."
    return asked, errors


def _size_in_gib(text: str) -> int:
    size = float(text)
    if not 0 <= size < 1e6:
        raise ValueError(text)
    return round(size * BYTES_PER_GIB)


def _whole_number(text: str) -> int:
    if not text.isdecimal() or len(text) > 12:
        raise ValueError(text)
    return int(text)


FIELD_READERS: Final[dict[str, Callable[[str], int | float | str]]] = {
    "whole": _whole_number,
    "size": _size_in_gib,
    "share": float,
    "text": str,
}
FIELD_KINDS: Final = {
    "whole": "a whole number",
    "size": "a size in GiB, 0 or more",
    "share": "a share above 0 and up to 1",
}


def _at_its_field(text: str) -> dict[str, str]:
    """Return the error under the field whose flag it names, or under the form if it names none."""
    named = [flag.replace("-", "_") for flag in NAMED_FLAG.findall(text)]
    name = next((one for one in named if one in PLANNER_FIELDS), "model" if "the model" in text else "")
    return {name: sentence(text)}


def _form(here: Here, plan: CapacityPlan | None, errors: dict[str, str]) -> list[Any]:
    filled = {one.name: one for one in plan.inputs} if plan is not None else {}
    groups = [
        html.Fieldset(
            [html.Legend(title), *(_labelled(one, here, filled, errors.get(one.name, "")) for one in group)],
        )
        for title, group in FIELD_GROUPS
    ]
    given = " ".join(f"{name}={here.place.get(name)}" for name in PLANNER_FIELDS)
    form = html.Form(
        [ui.field("hidden", "engine", here.name), *groups, html.Button("Plan", type="submit")],
        action="/plan",
        method="get",
        className="planner-form",
        key=f"{here.name} {given}",
    )
    rest = [html.P(errors[""], className="missing", role="alert")] if "" in errors else []
    note = "An empty field has the value that the engine states or that was measured. The address has every input."
    return [form, *rest, ui.note(note)]


def _labelled(one: PlannerField, here: Here, filled: dict[str, PlanInput], error: str) -> html.Label:
    known = filled.get(one.input)
    shown = _placeholder(known) if known is not None else ""
    state: dict[str, Any] = {"placeholder": shown} if shown else {}
    parts = [html.Span(one.label), ui.field("text", one.name, here.place.get(one.name), inputMode="decimal", **state)]
    if one.kind == "text":
        parts[1] = ui.field("text", one.name, here.place.get(one.name), **state)
    if error:
        parts.append(html.Small(error, id=f"{one.name}-error", className="missing", role="alert"))
    return html.Label(parts, className="invalid" if error else "")


def _placeholder(known: PlanInput) -> str:
    if isinstance(known.value, str):
        return known.value
    return f"{known.value / BYTES_PER_GIB:.2f}" if known.unit == "bytes" else f"{known.value:g}"


# -------------------------------------------------------------------- the plan


def _summary(plan: CapacityPlan) -> list[Any]:
    each = f", {plan.bytes_per_block:,} bytes each" if plan.bytes_per_block else ""
    lines = [
        html.P(
            [
                html.Strong(f"{plan.pool_tokens:,} tokens"),
                f" in {plan.blocks:,} blocks of {plan.block_size:,} tokens{each}.",
            ]
        ),
        html.P(
            f"The longest request that fits has {plan.longest_request:,} tokens."
            f" {plan.max_concurrency:.2f} requests of {plan.max_model_len:,} tokens fit at once."
        ),
    ]
    if plan.requests_at_once is not None:
        shared = plan.requests_at_once_sharing
        fit = "fits" if plan.requests_at_once == 1 else "fit"
        with_prefix = f", {shared:,} with the shared prefix" if shared is not None else ""
        lines.append(
            html.P(
                [
                    html.Strong(counted(plan.requests_at_once, "request")),
                    f" of {plan.request_tokens:,} tokens {fit} at once{with_prefix}, limited by {plan.limited_by}.",
                ],
                role="status",
            )
        )
    remarks = [*(f"Assumed: {one}." for one in plan.assumed), *(sentence(one) for one in plan.notes)]
    return [html.H2(f"The plan for {plan.model}"), *lines, html.Ul([html.Li(one) for one in remarks], className="note")]


def _chart(plan: CapacityPlan) -> list[Any]:
    rows = [
        Bar(f"{point.tokens:,} tokens", point.requests, "running" if point.requests else "bad")
        for point in plan.requests_by_length
    ]
    return [
        html.H2("Concurrency over length"),
        bars(rows),
        ui.note("Requests of each length that the pool holds at once, without a shared prefix."),
    ]


def _settings(plan: CapacityPlan) -> list[Any]:
    rows = [
        ui.tr(
            ui.row_head(html.Code(f"{one.flag} {one.value}")),
            html.Td([sentence(one.why), html.Br(), html.Small(sentence(one.costs), className="note")]),
            html.Td("limits" if one.limits else ""),
            key=one.flag,
        )
        for one in plan.settings
    ]
    table = ui.table(rows, "Setting", "Why, and what it costs", "Limit")
    return [html.H2("Settings"), html.Div(table, className="scrolls", tabIndex=0)]


def _inputs(plan: CapacityPlan) -> list[Any]:
    rows = [
        ui.tr(
            ui.row_head(one.name),
            html.Td(f"{_placeholder(one)} {'GiB' if one.unit == 'bytes' else one.unit}"),
            html.Td(f"from {one.source}" if one.source else one.origin),
            key=one.name,
        )
        for one in plan.inputs
    ]
    table = ui.table(rows, "Input", "Value", "Origin")
    return [html.H2("Inputs"), html.Div(table, className="scrolls", tabIndex=0)]
