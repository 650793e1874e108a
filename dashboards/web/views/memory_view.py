"""The device's memory: what it went to, the pool inside it, what was advised, and how many requests fit."""

from __future__ import annotations

from typing import Any, Final

from dash import html

from kvscope.monitor.base.errors import BadQuestion, NotKnown
from kvscope.monitor.base.text import counted, percent
from kvscope.monitor.questions.query import Query
from kvscope.monitor.questions.schema import CalculatorView, MemoryView

from .. import ui
from ..charts import Bar, bars
from ..display_text import clock_text, sentence
from ..pool import balance_bar, balance_legend
from ..view import Here, PageView, engine_then

BYTES_PER_GIB: Final = 1 << 30
MEMORY_FAMILIES: Final = {"free": "free", "not named": "bad", "other processes": "waiting", "KV cache": "running"}
NOTES: Final = {
    "KV cache": "allocated at the start. It does not shrink when requests end",
    "not named": "in use, without a known purpose",
    "other processes": "not of this engine",
    "free": "not allocated",
}
DEFAULTS: Final = {"prompt_tokens": "1000", "max_tokens": "500", "concurrency": "8"}
CALCULATOR_FIELDS: Final = (
    ("prompt_tokens", "Prompt tokens"),
    ("max_tokens", "Output tokens"),
    ("concurrency", "Concurrent requests"),
)


def view(query: Query, here: Here) -> PageView:
    """Return the breakdown, the pool, the suggestions, the calculator. Where no breakdown is known, the pool comes
    first.
    """
    breakdown, is_known = _breakdown(query, here)
    sections = {
        "breakdown": ui.card(breakdown, label="Memory breakdown"),
        "pool": ui.card(_pool(query, here), label="KV pool"),
        "calculator": ui.card(_calculator(query, here), label="Calculator"),
    }
    if not is_known:
        sections["breakdown"] = sections.pop("breakdown")
    return PageView({"head": html.H1("Memory breakdown" if is_known else "Memory"), **sections})


# -------------------------------------------------------------------- the breakdown


def _breakdown(query: Query, here: Here) -> tuple[list[Any], bool]:
    """Return the device's memory by use, and True, or where the engine reported none, a note on its sources, and
    False.
    """
    try:
        memory = query.memory(here.name)
    except NotKnown as error:
        sources = ui.note(
            [
                "vLLM logs it when it starts: ",
                html.Code("monitor explain memory --log FILE"),
                ". kvscope’s engine reports it in its event stream (on the CPU with ",
                html.Code("--memory-budget"),
                ").",
            ]
        )
        return [html.H2("Memory of the device"), ui.note(sentence(str(error))), sources], False
    return [*_parts(memory), *_suggestions(memory)], True


def _parts(memory: MemoryView) -> list[Any]:
    figures = memory.parts or {name.replace("_", " "): size for name, size in memory.measured.items()}
    total = memory.measured.get("device_total", 0)
    rows, before = [], 0
    for name, size in figures.items():
        if size:
            share = percent(size / total) if total else ""
            note = " · ".join(filter(None, (share, NOTES.get(name, ""))))
            rows.append(Bar(name, size, MEMORY_FAMILIES.get(name, ""), _gib(size), note, before if memory.parts else 0))
            before += size
    in_all = [html.P([html.Strong(_gib(total)), " in total"], className="since")] if total else []
    when = ui.note(f"As the engine measured it last, by {clock_text(memory.at)} UTC.")
    return [*in_all, bars(rows), when]


def _suggestions(memory: MemoryView) -> list[Any]:
    """Return the values for --kv-cache-memory-bytes."""
    lines = []
    now = memory.measured.get("kv_pool")
    for name, words in (("fit_requested", "to fit into the requested share"), ("use_all", "to use all of the device")):
        advised = memory.measured.get(name)
        if advised is not None:
            more = f", {_gib(abs(advised - now))} {'more' if advised >= now else 'less'} than now" if now else ""
            flag = html.Code(f"--kv-cache-memory-bytes {advised}")
            lines.append(html.Li([flag, f" {words} ({_gib(advised)}{more})"]))
    if not lines:
        return []
    return [html.H3("Suggestions, the sums done again from these figures"), html.Ul(lines, className="suggestions")]


# -------------------------------------------------------------------- the pool


def _pool(query: Query, here: Here) -> list[Any]:
    heading = html.H2("KV pool")
    try:
        engine = engine_then(query, here)
    except NotKnown as error:
        return [heading, ui.note(sentence(str(error)))]
    bar, legend = balance_bar(engine), html.Ul(balance_legend(engine), className="legend narrow")
    blocks, size = (engine.configuration.get(name) for name in ("num_gpu_blocks", "block_size"))
    if not (isinstance(blocks, int) and isinstance(size, int)):
        return [heading, bar, legend]
    whole = f"{blocks:,} blocks of {size:,} tokens, {blocks * size:,} tokens in total"
    return [heading, ui.note(whole), bar, legend]


# -------------------------------------------------------------------- the calculator


def _calculator(query: Query, here: Here) -> list[Any]:
    asked = {name: here.place.get(name, default) for name, default in DEFAULTS.items()}
    fields: list[Any] = [ui.field("hidden", "engine", here.name)]
    for name, words in CALCULATOR_FIELDS:
        fields.append(html.Label([html.Span(words), ui.field("number", name, asked[name], min="1", step="1")]))
    fields.append(html.Button("Calculate", type="submit"))
    form = html.Form(fields, action="/memory", method="get", className="calculator", key=" ".join(asked.values()))
    heading = html.H2("Concurrency calculator")
    try:
        numbers = {name: int(value) for name, value in asked.items() if value.isdecimal()}
        if len(numbers) < len(asked):
            raise BadQuestion("Each is a whole number, 1 or more")
        return [heading, form, *_answer(query.calculator(here.name, **numbers))]
    except (BadQuestion, NotKnown) as error:
        return [heading, form, html.P(sentence(str(error)), className="missing")]


def _answer(answer: CalculatorView) -> list[Any]:
    tokens = answer.prompt_tokens + answer.max_tokens
    requests, one = counted(answer.concurrency, "such request"), answer.concurrency == 1
    share = f", {percent(answer.share)}" if answer.share is not None else ""
    verdict = (
        f"{requests} {'fits' if one else 'fit'}: {answer.blocks_needed:,} of {answer.usable_blocks:,} blocks{share}."
        if answer.fits
        else f"{requests} {'does' if one else 'do'} not fit: {answer.blocks_needed:,} blocks are needed, and there are"
        f" {answer.usable_blocks:,}."
    )
    most = f" At most {answer.max_concurrency:,} fit at once." if answer.max_concurrency else " Not even one fits."
    size = f", {_gib(answer.bytes_per_request)}" if answer.bytes_per_request else ""
    lines = [
        html.P([html.Strong(verdict), most]),
        ui.note(
            f"Each is {tokens:,} tokens at its end: {counted(answer.blocks_per_request, 'block')} of"
            f" {answer.block_size:,} tokens{size}."
        ),
    ]
    notes = html.Ul([html.Li(note) for note in answer.notes], className="note")
    return [html.Div([*lines, notes], role="status", className="fits" if answer.fits else "fits not")]


def _gib(size: int) -> str:
    return f"{size / BYTES_PER_GIB:,.2f} GiB" if abs(size) >= BYTES_PER_GIB // 10 else f"{size / 2**20:,.1f} MiB"
