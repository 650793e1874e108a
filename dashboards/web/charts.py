"""Charts over time: several rows over one axis, with a legend beside them that shows the values at the pointer. And
horizontal bars, a figure a line.

Dragging over a chart chooses a window and a click chooses a time (assets/charts.js). Both are in the address then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

from dash import dcc, html

from . import ui
from .display_text import clock_text
from .links import PageWindow, rfc3339
from .palette import css

GAP_PX: Final = 20
MARKS_PX: Final = 22
AXIS_PX: Final = 26
SECONDS_A_DAY: Final = 86_400
LEAST_LABELLED: Final = 0.08
"""Share of the window: a narrower gap has no label."""


class Trace(NamedTuple):
    """One figure over time. `drawn`: `band` stacks it on those before, `line` draws it over them. `after` means that a
    value covers the window that ends at its time. Otherwise it holds from then on. A value of None is not known.
    """

    label: str
    rgb: tuple[int, int, int]
    values: Sequence[float | None]
    drawn: Literal["band", "line"] = "band"
    after: bool = False
    opacity: float = 1.0
    title: str = ""
    bad: bool = False
    """Whether anything but 0 is shown in red."""
    none: str = "not exposed"
    """The meaning of a value of None, for the legend."""


class ChartRow(NamedTuple):
    """A row of a chart: its heading, its height, its traces. `top`: where its axis ends, if that is known."""

    name: str
    height_px: int
    traces: list[Trace]
    top: float | None = None
    unit: str = ""


class ChartMark(NamedTuple):
    """Something that happened at a moment: `kind` is a class of the style sheet."""

    at_ns: int
    kind: Literal["error", "warning", "preempted", "configuration"]
    text: str
    href: str


_MARKS: Final = {
    "error": ("triangle-down", "rgb(208, 48, 43)"),
    "warning": ("triangle-down", "rgb(226, 163, 43)"),
    "preempted": ("diamond", css((205, 85, 150))),
    "configuration": ("square", css((80, 145, 220))),
}


def over_time(
    name: str,
    moments_ns: Sequence[int],
    rows: Sequence[ChartRow],
    window: PageWindow,
    *,
    marks: Sequence[ChartMark] = (),
    at_ns: int | None = None,
    caption: str = "",
    times: tuple[str, str] = ("from", "to"),
    gaps: Sequence[tuple[int, int]] = (),
) -> html.Div:
    """Return the chart `name`, of `rows` over the window, with a value of each trace for every time. `caption`: the
    chart in words. `times`: by which names the address has the window that is chosen on it. `gaps`: times without data
    (wall ns), each from one of the moments to the next. Nothing is drawn in them.
    """
    height = MARKS_PX + sum(row.height_px + GAP_PX for row in rows) + AXIS_PX
    chosen = len(moments_ns) - 1
    if at_ns is not None:
        chosen = max((index for index, moment in enumerate(moments_ns) if moment <= at_ns), default=0)
    at, index_of, ended = _with_ends(moments_ns, {since for since, _ in gaps})
    chosen = index_of.index(chosen) if index_of else -1
    traces: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    names: list[dict[str, Any]] = []
    top = height - MARKS_PX
    for number, row in enumerate(rows, start=1):
        axis = f"y{number}" if number > 1 else "y"
        for trace in row.traces:
            values = [None if place in ended else trace.values[index] for place, index in enumerate(index_of)]
            traces.append(_trace(trace._replace(values=values), at, axis))
        axes[axis.replace("y", "yaxis")] = _row_axis(row, top, height)
        names.append(_row_name(row.name, top / height))
        top -= row.height_px + GAP_PX
    figure: dict[str, Any] = {
        "data": [*traces, _mark_trace(marks, len(rows) + 1)],
        "layout": _layout(height, window, at_ns, marks, gaps),
    }
    figure["layout"] |= axes | {
        f"yaxis{len(rows) + 1}": _AXIS
        | {"domain": [(height - MARKS_PX) / height, 1], "range": [0, 1], "showgrid": False, "showticklabels": False},
        "meta": {"legend": f"{name}-legend", "chosen": chosen, "times": times},
        "annotations": names,
    }
    plot = html.Div(
        dcc.Graph(id=name, figure=figure),
        className="plot",
        role="img",
        style={"height": f"{height}px"},
        **ui.aria(label=caption),
    )
    shown = index_of[chosen] if index_of else -1
    return html.Div([_legend(name, rows, shown, moments_ns), plot], className="chart")


_AXIS: Final = {"showline": False, "zeroline": False, "fixedrange": True, "ticks": "", "rangemode": "tozero"}


def _row_axis(row: ChartRow, top: int, height: int) -> dict[str, Any]:
    """Return the axis of a row that begins `top` px above the lower end of the chart."""
    highest = max(_most(row), default=0)
    most = row.top or highest * 1.08 or 1
    return _AXIS | {
        "domain": [(top - row.height_px) / height, top / height],
        "range": [0, most],
        "tickformat": ",d" if most >= 3 else "",
        "nticks": 4 if row.height_px > 120 else 3,
        "gridcolor": "rgba(128,140,160,0.18)",
        "ticksuffix": row.unit,
        **({"dtick": 1} if highest in (0, 1, 2) and not row.top else {}),  # half a request is none
    }


def _with_ends(moments_ns: Sequence[int], ends: set[int]) -> tuple[list[int], list[int], set[int]]:
    """Return the times in ms, with one more behind each of `ends`, where the data ends, the index of the original time
    of each, and the places of those that were added.
    """
    at: list[int] = []
    index_of: list[int] = []
    added: set[int] = set()
    for index, moment in enumerate(moments_ns):
        at.append(moment // 1_000_000)
        index_of.append(index)
        if moment in ends:
            added.add(len(at))
            at.append(moment // 1_000_000 + 1)
            index_of.append(index)
    return at, index_of, added


def _most(row: ChartRow) -> list[float]:
    """Return the highest value of the row, of its bands together and of each line."""
    known = [(trace.drawn, [value or 0 for value in trace.values]) for trace in row.traces]
    bands = [values for drawn, values in known if drawn == "band"]
    lines = [max(values, default=0) for drawn, values in known if drawn == "line"]
    return [max(map(sum, zip(*bands, strict=True)), default=0), *lines] if bands else lines


def _trace(trace: Trace, at: list[int], axis: str) -> dict[str, Any]:
    drawn: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines",
        "name": trace.label,
        "x": at,
        "y": list(trace.values),
        "xaxis": "x",
        "yaxis": axis,
        "hoverinfo": "none",
    }
    shape = "vh" if trace.after else "hv"
    colour = css(trace.rgb, trace.opacity)
    if trace.drawn == "line":
        return drawn | {"line": {"width": 1.8, "shape": shape, "color": colour}}
    return drawn | {"stackgroup": axis, "fillcolor": colour, "line": {"width": 0, "shape": shape, "color": colour}}


def _mark_trace(marks: Sequence[ChartMark], row: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "meta": "marks",
        "x": [mark.at_ns // 1_000_000 for mark in marks],
        "y": [0.5] * len(marks),
        "xaxis": "x",
        "yaxis": f"y{row}",
        "text": [mark.text for mark in marks],
        "customdata": [mark.href for mark in marks],
        "hovertemplate": "%{text}<extra></extra>",
        "cliponaxis": False,
        "marker": {
            "symbol": [_MARKS[mark.kind][0] for mark in marks],
            "color": [_MARKS[mark.kind][1] for mark in marks],
            "size": 11,
        },
    }


def _layout(
    height: int,
    window: PageWindow,
    at_ns: int | None,
    marks: Sequence[ChartMark],
    gaps: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    lines = [(mark.at_ns, _MARKS[mark.kind][1], "dot") for mark in marks if mark.kind in ("error", "warning")]
    if at_ns is not None:
        lines.append((at_ns, "rgb(128, 134, 146)", "solid"))
    return {
        "height": height,
        "margin": {"l": 52, "r": 10, "t": 0, "b": 0},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "inherit", "size": 12},
        "showlegend": False,
        "hovermode": "x",
        "hoversubplots": "axis",
        "dragmode": "zoom",
        "xaxis": {
            "type": "date",
            "range": [window.since_ns // 1_000_000, window.until_ns // 1_000_000],
            "position": (AXIS_PX - 4) / height,
            "showgrid": False,
            "showline": False,
            "zeroline": False,
            "ticks": "",
            "tickformat": "%H:%M:%S" if window.seconds < SECONDS_A_DAY else "%b %d, %H:%M",
            "tickangle": 0,
            "showspikes": True,
            "spikemode": "across",
            "spikesnap": "cursor",
            "spikethickness": 1,
            "spikedash": "solid",
            "spikecolor": "rgba(128,134,146,0.8)",
        },
        "shapes": [
            {
                "type": "line",
                "x0": at // 1_000_000,
                "x1": at // 1_000_000,
                "y0": AXIS_PX / height,
                "y1": 1 - (MARKS_PX if dash == "dot" else 0) / height,
                "xref": "x",
                "yref": "paper",
                "line": {"color": colour, "width": 1.5, "dash": dash},
            }
            for at, colour, dash in lines
        ]
        + [_gap_shape(since, until, height, window) for since, until in joined_gaps(gaps)],
    }


def _row_name(name: str, top: float) -> dict[str, Any]:
    """Return the name above a row, which the style sheet shows where the legend is not beside the chart."""
    return {
        "text": name,
        "x": 1,
        "y": top,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "right",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 11, "color": "rgb(128,134,146)"},
    }


def joined_gaps(gaps: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the gaps, those that only one moment parts as one: it has no width to draw anything in."""
    joined: list[tuple[int, int]] = []
    for since_ns, until_ns in gaps:
        if joined and joined[-1][1] == since_ns:
            since_ns = joined.pop()[0]
        joined.append((since_ns, until_ns))
    return joined


def _gap_shape(since_ns: int, until_ns: int, height: int, window: PageWindow) -> dict[str, Any]:
    """Return a grey field over all rows, with the words in it where there is room."""
    has_room = until_ns - since_ns >= LEAST_LABELLED * (window.until_ns - window.since_ns)
    return {
        "type": "rect",
        "x0": since_ns // 1_000_000,
        "x1": until_ns // 1_000_000,
        "y0": AXIS_PX / height,
        "y1": 1 - MARKS_PX / height,
        "xref": "x",
        "yref": "paper",
        "fillcolor": "rgba(128,134,146,0.16)",
        "line": {"width": 1, "dash": "dot", "color": "rgba(128,134,146,0.6)"},
        "layer": "below",
        "label": {"text": "no data" if has_room else "", "font": {"size": 11, "color": "rgb(128,134,146)"}},
    }


def _digits(value: float) -> int:
    """How many decimals a value in the legend has, as in assets/charts.js."""
    if value == round(value):
        return 0
    return 2 if abs(value) < 1 else 1 if abs(value) < 10 else 0


def _legend(name: str, rows: Sequence[ChartRow], chosen: int, moments_ns: Sequence[int]) -> html.Div:
    """Return the values at a moment, also before the chart is drawn and where it never is."""
    moment = clock_text(rfc3339(moments_ns[chosen])) if moments_ns else ""
    number = 0
    parts: list[Any] = [html.P(["at ", html.Span(moment, **ui.data(moment=""))], className="moment")]
    for row in rows:
        items = []
        for trace in row.traces:
            value = trace.values[chosen] if trace.values else 0
            written = trace.none if value is None else f"{value:,.{_digits(value)}f}{row.unit}"
            colour = {"backgroundColor": css(trace.rgb, trace.opacity)}
            items.append(
                html.Li(
                    [
                        html.Span(className=f"swatch {trace.drawn}", style=colour),
                        html.Span(trace.label, className="what"),
                        html.Span(
                            written,
                            className="count" if value else "count zero",
                            **ui.data(trace=number, unit=row.unit, none=trace.none),
                        ),
                    ],
                    title=trace.title,
                    className="bad" if trace.bad else "",
                )
            )
            number += 1
        height = {"--height": f"{row.height_px + GAP_PX}px"}
        parts.append(html.Div([html.H3(row.name), html.Ul(items)], style=height, className="row-keys"))
    return html.Div(parts, id=f"{name}-legend", className="readout")


class Bar(NamedTuple):
    """One line: `family` is a class of the style sheet, `text` what is written for the figure (the figure itself).
    `before`: where it begins, as in a waterfall.
    """

    label: str
    value: float
    family: str = ""
    text: str = ""
    note: str = ""
    before: float = 0


def bars(rows: Sequence[Bar]) -> html.Table:
    """Return the bars, all to one scale, as a table for screen readers."""
    most = max((row.before + row.value for row in rows), default=0) or 1
    return html.Table(
        html.Tbody(
            [
                ui.tr(
                    ui.row_head(row.label),
                    html.Td(row.text or f"{row.value:,.0f}", className="n"),
                    html.Td(html.Span(style=_extent(row, most), className=f"length {row.family}"), className="rod"),
                    html.Td(row.note, className="note"),
                    key=row.label,
                )
                for row in rows
            ]
        ),
        className="bars",
    )


def _extent(row: Bar, most: float) -> dict[str, str]:
    return {"width": f"{100 * max(row.value, 0) / most:.2f}%", "marginLeft": f"{100 * max(row.before, 0) / most:.2f}%"}
