"""A figure's recent past as a small line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from dash import html

SPARKLINE_WIDTH: Final = 120
SPARKLINE_HEIGHT: Final = 22


def sparkline(
    name: str, values: Sequence[float | None], unit: str, rgb: tuple[int, int, int], top: float = 0.0
) -> list[Any]:
    """Return the line as an image, with its extremes in words, or nothing if too few are known or all are 0.

    top: where its axis ends, 0 for the highest value.
    """
    known = [value for value in values if value is not None]
    if len(known) < 2 or not any(known):
        return []
    words = f"{name} over 10 min: {min(known):,.0f} to {max(known):,.0f}{unit}, now {known[-1]:,.0f}{unit}"
    return [html.Img(src=_svg(values, rgb, top or max(known) or 1.0), alt=words, title=words, className="sparkline")]


def _svg(values: Sequence[float | None], rgb: tuple[int, int, int], top: float) -> str:
    """As a data URL. Unknown values break the line."""
    step = SPARKLINE_WIDTH / max(len(values) - 1, 1)
    lines: list[list[tuple[float, float]]] = [[]]
    for place, value in enumerate(values):
        if value is not None:
            lines[-1].append((place * step, 1 + (SPARKLINE_HEIGHT - 2) * (1 - min(value / top, 1.0))))
        elif lines[-1]:
            lines.append([])
    path, areas = "", ""
    for line in filter(None, lines):
        path += "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in line)
        outline = [(line[0][0], SPARKLINE_HEIGHT), *line, (line[-1][0], SPARKLINE_HEIGHT)]
        areas += f"<polygon points='{' '.join(f'{x:.1f},{y:.1f}' for x, y in outline)}'/>"
    colour = "#" + "".join(f"{part:02x}" for part in rgb)
    size = f"viewBox='0 0 {SPARKLINE_WIDTH} {SPARKLINE_HEIGHT}' preserveAspectRatio='none'"
    svg = (
        f"<svg xmlns='http://www.w3.org/2000/svg' {size}>"
        f"<g fill='{colour}' fill-opacity='0.2'>{areas}</g>"
        f"<path d='{path}' fill='none' stroke='{colour}' stroke-width='1.5'/></svg>"
    )
    return "data:image/svg+xml," + quote(svg, safe=" =:/'")
