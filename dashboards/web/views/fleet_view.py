"""Many engines at a glance: the worst in a table, and all of them as cells and heat strips, grouped.

/fleet?by=harm|model|version|zone|node|agent&q=PART

`q` keeps the engines that have it in their name, model, version, zone, node, agent or open findings. The prefill and
decode engines of each service stand side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote_plus

from dash import html

from kvscope.monitor.base.text import counted, duration, percent
from kvscope.monitor.questions.fleet_schema import (
    HARMS,
    FleetAgentView,
    FleetCause,
    FleetEngineView,
    FleetService,
    FleetView,
)
from kvscope.monitor.questions.query import Query

from .. import ui
from ..display_text import clock_text, day_and_clock, number_text
from ..pictures import strips_picture
from ..view import FLEET_PATH, Here, PageView

GROUPINGS: Final = ("harm", "model", "version", "zone", "node", "agent")
HARM_WORDS: Final = {
    "critical": "Critical finding",
    "error": "Error",
    "warning": "Warning",
    "unserved": "Serves no client, without a finding",
    "unknown": "Nothing is known now",
    "none": "No known fault",
}
MOST_IN_TABLE: Final = 30
MOST_GROUPS: Final = 40
"""Further groups are one."""
MOST_AGENTS: Final = 20
MOST_CAUSES_SHOWN: Final = 12
MOST_NOTES_SHOWN: Final = 20
CAUSE_WORDS: Final = {
    "release": "Release",
    "model": "Model",
    "zone": "Zone",
    "node": "Node",
    "agent": "Agent",
    "connector": "KV connector",
    "time": "Began together at",
}
MOST_CODES: Final = 3


def view(query: Query, here: Here) -> PageView:
    """Return the headline, what findings and services show, the worst engines, and all of them by group."""
    fleet = query.fleet_overview()
    part, by = here.place.get("q"), _grouping(here)
    shown = [engine for engine in fleet.engines if _has(engine, part.lower())]
    found = [ui.note(f"{counted(len(shown), 'engine')} with {part[:80]!r}")] if part else []
    sections: dict[str, Any] = {
        "head": html.Header([html.H1(_headline(fleet)), _form(here, by, part), *found]),
        "causes": _causes(here, fleet.causes),
        "services": service_table(here, fleet.services, fleet.engines),
        "agents": _agents(fleet.agents),
        "worst": _worst(here, shown),
    }
    for number, (name, engines) in enumerate(_grouped(shown, by)):
        sections[f"group {number}"] = _group(here, name, engines)
        sections[f"strips {number}"] = _strips(engines)
    return PageView(sections | {"notes": _notes(fleet)})


def _grouping(here: Here) -> str:
    by = here.place.get("by", GROUPINGS[0])
    return by if by in GROUPINGS else GROUPINGS[0]


def _has(engine: FleetEngineView, part: str) -> bool:
    texts = (engine.engine, engine.model, engine.version, engine.zone, engine.node, engine.agent, *engine.codes)
    return not part or any(part in text.lower() for text in texts)


def _headline(fleet: FleetView) -> str:
    counts = Counter(engine.harm for engine in fleet.engines)
    bad = sum(counts[harm] for harm in ("critical", "error", "warning"))
    parts = [f"{counted(bad, 'engine')} of {len(fleet.engines):,} with open findings" if bad else ""]
    parts.append(f"{counts['unserved']:,} serve no client without a finding" if counts["unserved"] else "")
    parts.append(f"nothing is known of {counts['unknown']:,} now" if counts["unknown"] else "")
    text = "; ".join(filter(None, parts)) or f"No known fault on {counted(len(fleet.engines), 'engine')}"
    return text if fleet.is_complete else f"Still reading what is stored. So far: {text}"


def _form(here: Here, by: str, part: str) -> html.Form:
    fields = [
        html.Label([html.Span("Engine, model, node or code has"), ui.field("search", "q", part)]),
        ui.choice("by", "Group by", ui.same(GROUPINGS[1:]), by if by != "harm" else "", none="harm"),
        html.Button("Show", type="submit"),
    ]
    return ui.filter_form(fields, FLEET_PATH, f"{by} {part}")


def _agents(agents: Sequence[FleetAgentView]) -> Any:
    silent = [agent for agent in agents if agent.error]
    if not silent:
        return []
    items = [
        html.Li([html.Strong(agent.agent), f" with {counted(agent.engines, 'engine')}: {agent.error}"])
        for agent in silent[:MOST_AGENTS]
    ]
    if len(silent) > MOST_AGENTS:
        items.append(html.Li(f"and {len(silent) - MOST_AGENTS:,} more"))
    head = f"{counted(len(silent), 'agent')} of {len(agents):,} did not respond"
    return ui.card([html.H2(head), html.Ul(items)], id="agents", label="Agents")


def _causes(here: Here, causes: Sequence[FleetCause]) -> Any:
    """Return findings of several engines by what these share, in a table."""
    if not causes:
        return []
    rows = [
        ui.tr(
            ui.row_head([html.Code(cause.code), ui.small_note(cause.title)]),
            html.Td([html.Strong(CAUSE_WORDS[cause.kind]), " ", _cause_link(here, cause)]),
            ui.text_cell(cause.explanation),
            html.Td(f"since {clock_text(cause.since)} UTC" if cause.since else ""),
            key=f"{cause.kind} {cause.name} {cause.code}",
            kind="bad",
        )
        for cause in causes[:MOST_CAUSES_SHOWN]
    ]
    more = len(causes) - len(rows)
    left = [ui.small_note(f"and {more:,} more groups")] if more else []
    table = html.Div(ui.table(rows, "Finding", "In common", "Engines", "Since"), className="scroll")
    hint = ui.note("What engines share is where to look first. It is not yet the cause.")
    head = html.H2("Findings with something in common")
    return ui.card([head, table, *left, hint], id="causes", label="In common")


def _cause_link(here: Here, cause: FleetCause) -> Any:
    if cause.kind == "time":
        return f"{clock_text(cause.name)} UTC"
    if cause.kind == "connector":
        return cause.name
    by = "version" if cause.kind == "release" else cause.kind
    return html.A(cause.name, href=here.place.to(FLEET_PATH, engine="", by=by, q=cause.name))


def _notes(fleet: FleetView) -> Any:
    if not fleet.notes:
        return []
    items = [
        html.Li(
            f"{day_and_clock(note.at)} UTC · {note.engine or note.agent}: {note.text}",
            key=f"{note.at} {note.engine} {note.text[:100]}",
        )
        for note in fleet.notes[:MOST_NOTES_SHOWN]
    ]
    label = ui.aria(label="Annotations")
    return html.Section([html.H2("Annotations"), html.Ul(items)], id="notes", className="card", **label)


def _worst(here: Here, shown: Sequence[FleetEngineView]) -> Any:
    worst = [engine for engine in shown if engine.harm != "none"] or list(shown)
    rows = [_worst_row(here, engine) for engine in worst[:MOST_IN_TABLE]]
    columns = ("Engine", "Pool, last 10 minutes", "Requests", "Output", "Open findings")
    more = [ui.note(f"and {len(worst) - MOST_IN_TABLE:,} more below")] if len(worst) > len(rows) else []
    table = html.Div(ui.table(rows, *columns), className="scroll")
    return ui.card([table, *more], id="engines", label="Engines in need of attention")


def _worst_row(here: Here, engine: FleetEngineView) -> html.Tr:
    link = ui.engine_link(here.place, engine.engine)
    late = f"{engine.status}, {duration(engine.age_s)} old" if engine.harm == "unknown" else engine.status
    about = " · ".join(filter(None, (late, engine.model, engine.version, engine.zone, engine.node or engine.agent)))
    used = "not exposed" if engine.usage is None else f"{percent(engine.usage)} in use"
    strip = html.Img(src=strips_picture([engine.usage_strip]), alt="", className="strip")
    more = len(engine.codes) - MOST_CODES
    codes: list[Any] = [html.Code(code) for code in engine.codes[:MOST_CODES]]
    codes += [f" and {more} more"] if more > 0 else []
    cells = [
        ui.row_head([ui.status_dot(engine.status), link, ui.small_note(about)]),
        html.Td([strip, ui.small_note(used)], className="pool"),
        html.Td(f"{number_text(engine.running)} running, {number_text(engine.waiting)} waiting"),
        html.Td(number_text(engine.output_tokens_per_s, "tok/s", none="unknown")),
        html.Td(codes or html.Span("none", className="none")),
    ]
    return html.Tr(cells, key=engine.engine, className="bad" if engine.codes else "")


def _grouped(shown: Sequence[FleetEngineView], by: str) -> list[tuple[str, list[FleetEngineView]]]:
    """Return groups with their names: those of harm from the worst, others with the worst engines first."""
    groups: dict[str, list[FleetEngineView]] = {}
    for engine in shown:
        groups.setdefault(getattr(engine, by), []).append(engine)
    if by == "harm":
        return [(HARM_WORDS[harm], groups[harm]) for harm in HARMS if harm in groups]
    worst = sorted(groups.items(), key=lambda group: (HARMS.index(group[1][0].harm), -len(group[1]), group[0]))
    listed = [(name or f"{by} not known", engines) for name, engines in worst[:MOST_GROUPS]]
    rest = [engine for _, engines in worst[MOST_GROUPS:] for engine in engines]
    return [*listed, (f"{len(worst) - MOST_GROUPS:,} further groups", rest)] if rest else listed


def _group(here: Here, name: str, engines: Sequence[FleetEngineView]) -> html.Section:
    """Return a group's cells, a link for each engine."""
    counts = Counter(engine.harm for engine in engines)
    harms = ", ".join(f"{counts[harm]:,} {harm}" for harm in HARMS if counts[harm] and harm != "none")
    there = here.place.to("engine", engine="")
    there += "&engine=" if "?" in there else "?engine="
    cells: Any = [_cell(engine, there + quote_plus(engine.engine)) for engine in engines]
    head = html.H2(
        [name, html.Span(f"{counted(len(engines), 'engine')}{': ' if harms else ''}{harms}", className="how")]
    )
    return ui.card([head, html.Div(cells, className="cells")], label=name)


def _cell(engine: FleetEngineView, address: str) -> dict[str, Any]:
    """Return an engine's link in its serialized form: a component for each of a thousand takes longer than all the
    rest.
    """
    title = f"{engine.engine}: {', '.join(engine.codes) or engine.status}"
    properties = {"children": "", "href": address, "title": title, "className": f"cell {engine.harm}"}
    return {"type": "A", "namespace": "dash_html_components", "props": properties}


def _strips(engines: Sequence[FleetEngineView]) -> html.Figure:
    """Return a group's heat strips: a section of its own, since it changes every few seconds and cells seldom do."""
    picture = html.Img(
        src=strips_picture([engine.usage_strip for engine in engines]),
        alt=f"Pool usage of {counted(len(engines), 'engine')} over the last 10 minutes",
        className="strips",
        style={"height": f"{min(240, max(12, 4 * len(engines)))}px"},
    )
    caption = html.Figcaption("Pool usage over the last 10 minutes, a line for each engine", className="note")
    return html.Figure([caption, picture], className="card")


MOST_SERVICES: Final = 12
MOST_ENGINES: Final = 6
"""Of each side of a service: the worst off, then the others by name."""
SIDE_WORDS: Final = {
    "producers": "Prefill holds decode up",
    "consumers": "Decode holds prefill up",
    "transfer": "Transfers do not complete",
    "none": "Prefill keeps blocks",
}


def service_table(here: Here, services: Sequence[FleetService], engines: Sequence[FleetEngineView]) -> Any:
    """Return a row for each service: producers with their held blocks, consumers with their queues."""
    if not services:
        return []
    by_name = {engine.engine: engine for engine in engines}
    rows = [_service_row(here, service, by_name) for service in services[:MOST_SERVICES]]
    more = len(services) - len(rows)
    left = [ui.small_note(f"and {more:,} more services")] if more else []
    columns = ("Service", "Prefill: blocks held for transfers", "Decode: requests that wait", "Findings")
    table = html.Div(ui.table(rows, *columns), className="scroll")
    head = html.H2("Prefill and decode")
    return ui.card([head, table, *left], id="services", label="Prefill and decode")


def _service_row(here: Here, service: FleetService, by_name: Mapping[str, FleetEngineView]) -> html.Tr:
    how = "by name" if service.grouped_by == "service" else "by model and zone"
    sides = counted(len(service.producers), "producer"), counted(len(service.consumers), "consumer")
    cells = [
        ui.row_head([html.Strong(service.name), ui.small_note(f"{how}: {sides[0]}, {sides[1]}")]),
        html.Td(_engines_of(here, service.producers, by_name)),
        html.Td(_engines_of(here, service.consumers, by_name)),
        ui.text_cell(_statement_of(service)),
    ]
    return html.Tr(cells, key=f"{service.grouped_by} {service.name}", className="bad" if service.statement else "")


def _engines_of(here: Here, names: Sequence[str], by_name: Mapping[str, FleetEngineView]) -> list[Any]:
    items = [_engine_item(here, by_name[name]) for name in names[:MOST_ENGINES]]
    more = len(names) - len(items)
    return [html.Ul(items, className="plain"), *([ui.small_note(f"and {more:,} more")] if more else [])]


def _engine_item(here: Here, engine: FleetEngineView) -> html.Li:
    link = ui.engine_link(here.place, engine.engine)
    status = ui.status_dot(engine.status)
    text = _held_text(engine) if engine.kv_role == "producer" else _fetch_queue_text(engine)
    return html.Li([status, link, ui.small_note(f"{engine.status} · {text}")], key=engine.engine)


def _held_text(engine: FleetEngineView) -> str:
    held = "held blocks not exposed" if engine.held_blocks is None else f"{counted(engine.held_blocks, 'block')} held"
    used = "" if engine.usage is None else f", pool {percent(engine.usage)} in use"
    return f"{held}{used}, {number_text(engine.waiting)} waiting"


def _fetch_queue_text(engine: FleetEngineView) -> str:
    fetching = "remote KV not exposed" if engine.fetching is None else f"{engine.fetching:,} for remote KV"
    used = "" if engine.usage is None else f", pool {percent(engine.usage)} in use"
    return f"{number_text(engine.waiting)} waiting, {fetching}{used}"


def _statement_of(service: FleetService) -> list[Any]:
    if not service.statement:
        return [html.Span("no finding about transfers", className="none")]
    return [html.Strong(SIDE_WORDS[service.held_up_by]), f" ({service.verdict}): ", service.statement]
