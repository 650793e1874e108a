"""All figures of a live page belong to one position of the stream, and equal a second fold at that position.

Findings and their forecast are those of the last judgement before it, half a second of the stream at most.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kvscope.dashboards.web.links import PagePlace
from kvscope.dashboards.web.palette import PALETTE_SHADES
from kvscope.dashboards.web.rendering import Page, Pages
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base.text import in_words
from kvscope.monitor.contract.kinds import Status
from kvscope.monitor.contract.wire import Batch
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.query import QUESTIONS
from tests.web.page_fold import PageFold
from tests.web.parts import ENGINE

MOMENTS = 210
SLOW_STEPS = 0.06
"""A step of ten seconds leaves no rate of the last five, and old requests behind."""
VIEWS = ("blocks", "engine", "requests", "", "held", "prefixes", "memory")
WINDOW_S = 600
BLOCK_SIZE = 4
TEMPLATES: tuple[list[int], ...] = ([], [1] * 12, [2] * 24)
ABORTS = 0.01
"""Of the steps. The blocks of every second one are lost."""
FEW = 1
CONSTANT = (("memory", "whole"), ("memory", "calculated"))
STATES = ("reserved", "free", "cached-idle", "running", "waiting", "finished", "UNACCOUNTED")
"""In the order of the map's palette."""


class MovingWatch(Pipeline):
    """A pipeline whose engine goes on under a drawn load after every answer, and all batches that it was fed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.batches: list[Batch] = []
        self._rng = random.Random(seed)
        self._lab = Lab(total=129, connector_share=0.3, faults=["leak.unaccounted:every=2"], seed=seed)
        self._fed = 0
        self.go_on = self._go_on
        """Of the live one: a snapshot's answers move it, too."""
        self.go_on()

    def _go_on(self) -> None:
        lab = self._lab
        for _ in range(self._rng.randint(1, 3)):
            if len(lab.scheduler.requests) < 24 and self._rng.random() < 0.6:
                shared = self._rng.choice(TEMPLATES)
                own = [self._rng.randrange(1000) for _ in range(self._rng.randint(4, 60 - len(shared)))]
                lab.arrive([*shared, *own], max_tokens=self._rng.randint(1, 20))
            if lab.scheduler.running and self._rng.random() < ABORTS:
                lab.abort(self._rng.choice(lab.scheduler.running))
            lab.step(10.0 if self._rng.random() < SLOW_STEPS else self._rng.uniform(0.01, 0.5))
        lab.flush()
        new = lab.frames[self._fed :]
        self._fed += len(new)
        self.batches += [frame for frame in new if isinstance(frame, Batch)]
        self.feed(new)


def moving(ask: Callable[..., Any]) -> Callable[..., Any]:
    def answered(self: MovingWatch, *args: Any, **named: Any) -> Any:
        try:
            return ask(self, *args, **named)
        finally:
            self.go_on()

    return answered


for asked in QUESTIONS:
    setattr(MovingWatch, asked, moving(getattr(Pipeline, asked)))


def nodes(tree: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Elements of a kind, as they are sent."""
    if isinstance(tree, list):
        for one in tree:
            yield from nodes(one, kind)
    elif isinstance(tree, dict):
        if tree.get("type") == kind:
            yield tree["props"]
        yield from nodes(tree.get("props", {}).get("children"), kind)


def text_of(tree: Any) -> str:
    if isinstance(tree, list):
        return " ".join(map(text_of, tree))
    if isinstance(tree, dict):
        return text_of(tree.get("props", {}).get("children"))
    return "" if tree is None else str(tree)


def shown(page: Page, name: str) -> Any:
    return json.loads(page.sections[f"main {name}"])


def legend_of(page: Page, section: str) -> Counter[str]:
    labels = {shade.label: shade.state for shade in PALETTE_SHADES}
    counts: Counter[str] = Counter()
    for item in nodes(shown(page, section), "Li"):
        label, count = (text_of(part) for part in item["children"][1:3]) if len(item["children"]) == 4 else ("", "")
        if label in labels:
            counts[labels[label]] += int(count.replace(",", ""))
    return +counts


def painted(page: Page) -> Counter[str]:
    """Blocks by the colour that the map paints them in."""
    (source,) = (image["src"] for image in nodes(shown(page, "map"), "Img") if image["id"] == "map")
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))))
    return Counter({STATES[value - 1]: int(count) for value, count in enumerate(np.bincount(pixels.ravel())) if value})


def last_event(page: Page) -> tuple[int, ...]:
    """The position of the last event that is listed."""
    links = [link["href"] for link in nodes(shown(page, "map"), "A") if "at=" in link.get("href", "")]
    return place_in(re.findall(r"at=([^&]+)", links[-1])[0].replace("%2F", "/"))


def place_in(position: str) -> tuple[int, ...]:
    return tuple(int(part) for part in position.split("/"))


def number(text: str) -> int:
    return int(text.replace(",", ""))


def tiles_of(page: Page, section: str) -> dict[str, tuple[str, str]]:
    """Each with its value and its note."""
    tiles = [[text_of(part) for part in tile["children"]] for tile in nodes(shown(page, section), "Div")]
    return {tile[0]: (tile[1], tile[2]) for tile in tiles if len(tile) == 3}


def rows_of(page: Page, section: str) -> list[list[str]]:
    return [[text_of(cell) for cell in row["children"]] for row in nodes(shown(page, section), "Tr")]


def last_point(page: Page) -> tuple[int, dict[str, int]]:
    """The time of the last point of the chart in ms, and its queues and blocks that are not 0."""
    (figure,) = (graph["figure"] for graph in nodes(shown(page, "chart"), "Graph"))
    rows: dict[str, list[dict[str, Any]]] = {}
    for trace in figure["data"]:
        if trace.get("name"):
            rows.setdefault(trace["yaxis"], []).append(trace)
    (pool,) = (row for row in rows.values() if "UNACCOUNTED" in [trace["name"] for trace in row])
    (queue,) = (row for row in rows.values() if row[-1]["name"] == "running" and row is not pool)
    blocks = {f"blocks {trace['name']}": trace["y"][-1] for trace in pool if trace["name"] in LABELS}
    return pool[0]["x"][-1], +Counter(blocks | {f"requests {trace['name']}": trace["y"][-1] for trace in queue})


LABELS = {shade.label: shade.state for shade in PALETTE_SHADES}
LATENCIES = ("First token", "Queue time")


def figures_of(page: Page, view: str) -> dict[str, Any]:
    """The figures that a page states, by name."""
    return FIGURES_OF[view](page)


def of_blocks(page: Page) -> dict[str, Any]:
    return {"legend": legend_of(page, "map"), "map": painted(page)}


def of_engine(page: Page) -> dict[str, Any]:
    tiles = tiles_of(page, "summary")
    return {
        "running": number(tiles["Running"][0]),
        "waiting": number(tiles["Waiting"][0]),
        "reasons": reasons_in(tiles["Waiting"][1]),
        "preemptions": number(tiles["Preemptions"][0]),
        "usage": tiles["Pool in use"][0],
        "hits": tiles["Prefix hits"][0],
        "rates": (tiles["Output"][0], tiles["Computed"][0]),
        "full in": tiles.get("Pool full in"),
        "last point": last_point(page),
        **{name: tiles[f"{name}, p95"] for name in LATENCIES if f"{name}, p95" in tiles},
    }


def of_requests(page: Page) -> dict[str, Any]:
    rows = [row["children"] for row in nodes(shown(page, "requests"), "Tr")][1:]
    alive = [cells for cells in rows if "FINISHED" not in cells[1]["props"]["title"]]
    return {"blocks": {text_of(cells[0]): number(text_of(cells[4])) for cells in alive}}


def of_overview(page: Page) -> dict[str, Any]:
    (row,) = (row for row in nodes(shown(page, "engines"), "Tr") if ENGINE in text_of(row["children"]))
    cells = [text_of(cell) for cell in row["children"]]
    running, waiting, reasons = re.findall(r"(\d+) running, (\d+) waiting *(\D?[^▁]*)", cells[2])[0]
    (bar,) = (div["aria-label"] for div in nodes(row["children"][1], "Div") if "aria-label" in div)
    latencies = {name: cells[place] for place, name in enumerate(LATENCIES, start=4)}
    queues = {"running": int(running), "waiting": int(waiting), "reasons": reasons_in(reasons)}
    return queues | {"bar": bar, "output": cells[3], **latencies}


def of_held(page: Page) -> dict[str, Any]:
    groups = {(row[0], row[2]): number(row[5]) for row in rows_of(page, "held")[1:]}
    lifetimes = [number(row[1]) for row in rows_of(page, "lifetimes")]
    tiles = [number(value) for value, _ in tiles_of(page, "head").values()]
    return {"tiles": tiles, "held": groups, "lifetimes": lifetimes}


def of_prefixes(page: Page) -> dict[str, Any]:
    tiles = tiles_of(page, "head")
    nodes_shown = [[number(cell) for cell in row[1:4]] for row in rows_of(page, "tree")[1:]]
    assert "left out" not in text_of(shown(page, "tree"))
    evictions = [(number(row[2]), number(row[3].replace("none", "0"))) for row in rows_of(page, "evictions")[1:]]
    return {
        "cached": number(tiles["Cached"][0]),
        "idle": number(tiles["Idle"][0]),
        "shared": number(tiles["Shared"][0]),
        "hits": tiles["Hit rate"][0],
        "contents": sum(blocks for blocks, _, _ in nodes_shown),
        "references": sum(blocks * references for blocks, _, references in nodes_shown),
        "evictions": evictions,
    }


def of_memory(page: Page) -> dict[str, Any]:
    whole = re.findall(r"([\d,]+) blocks of ([\d,]+) tokens, ([\d,]+) tokens in total", text_of(shown(page, "pool")))
    fits = re.findall(r"([\d,]+) (?:of|blocks are needed, and there are) ([\d,]+)", text_of(shown(page, "calculator")))
    return {"legend": legend_of(page, "pool"), "whole": [*map(number, *whole)], "calculated": [*map(number, *fits)]}


FIGURES_OF: dict[str, Callable[[Page], dict[str, Any]]] = {
    "blocks": of_blocks,
    "engine": of_engine,
    "requests": of_requests,
    "": of_overview,
    "held": of_held,
    "prefixes": of_prefixes,
    "memory": of_memory,
}


def reasons_in(words: str) -> Counter[str]:
    """Of `3 for KV blocks, 1 new`."""
    return Counter({name: int(count) for count, name in re.findall(r"(\d+) ([^,]+?)\s*(?:,|$)", words)})


def figures_at(fold: PageFold, view: str, names: dict[int, str]) -> dict[str, Any]:
    """The same by the fold."""
    states = fold.states()
    alive = fold.alive()
    running = sum(status == Status.RUNNING for status in alive.values())
    reasons = Counter({in_words(reason): count for reason, count in fold.reasons().items()})
    queues = {"running": running, "waiting": len(alive) - running, "reasons": reasons}
    output, computed = fold.rates()
    latencies = dict(zip(LATENCIES, map(fold.latency, (fold.first_token, fold.admitted)), strict=True))
    if view == "blocks":
        return {"legend": states, "map": states}
    if view == "engine":
        used = sum(fold.references[block] > 0 for block in range(fold.total))
        known = {name: latency for name, latency in latencies.items() if latency[1]}
        return (
            queues
            | known
            | {"preemptions": sum(fold.preempted.values()), "rates": (output, computed), "full in": fold.forecast}
            | {"usage": f"{100 * used / (fold.total - fold.reserved):.1f} %", "hits": fold.prefixes()["hits"]}
            | {"last point": point_of(fold)}
        )
    if view == "requests":
        return {"blocks": {names[request]: len(fold.tables.get(request, ())) for request in alive}}
    if view == "held":
        reported = fold.retained(WINDOW_S)
        named = {(names.get(int(owner[1:]), owner), why): count for (owner, why), count in reported["held"].items()}
        return reported | {"held": named}
    if view == "prefixes":
        return fold.prefixes()
    if view == "memory":
        needed = 8 * -(-1500 // BLOCK_SIZE)
        whole = [fold.total, BLOCK_SIZE, fold.total * BLOCK_SIZE]
        return {"legend": states, "whole": whole, "calculated": [needed, fold.total - fold.reserved]}
    bar = ", ".join(f"{states[shade.state]:,} {shade.label}" for shade in PALETTE_SHADES if states[shade.state])
    output = f"{output} {computed.removesuffix(' tok/s')} computed" if output != "not known" else output
    joined = {name: " ".join(latency).strip() for name, latency in latencies.items()}
    return queues | {"bar": bar, "output": output} | joined


def point_of(fold: PageFold) -> tuple[int, dict[str, int]]:
    at_ns, states, reasons, running = fold.points[-1]
    blocks = {f"blocks {label}": states[state] for label, state in LABELS.items()}
    requests = {f"requests {in_words(reason)}": count for reason, count in reasons.items()}
    return at_ns // 1_000_000, +Counter(blocks | requests | {"requests running": running})


@pytest.mark.slow
def test_every_figure_of_a_page_is_of_the_position_that_it_states() -> None:
    seen: list[tuple[str, str, dict[str, Any]]] = []
    watch = MovingWatch(seed=7)
    clock = itertools.count(0.0, 100.0)  # at each look all of it is due
    pages = Pages(watch, lambda: next(clock))

    async def look() -> None:
        for moment in range(MOMENTS):
            view = VIEWS[moment % len(VIEWS)]
            page = await pages.page(PagePlace(view, ENGINE))
            if view == "blocks":
                assert last_event(page)[:2] <= place_in(page.notices["position"])
            seen.append((page.notices["position"], view, figures_of(page, view)))

    asyncio.run(look())
    fold = PageFold()
    batches = iter(watch.batches)
    place = (0, -1)
    names = {number: name for batch in watch.batches for number, name in batch.texts.items()}
    for position, view, figures in seen:
        while place < place_in(position)[:2]:
            batch = next(batches)
            fold.add(batch)
            place = (batch.epoch, batch.sequence)
        expected = figures_at(fold, view, names)
        assert figures == expected, (position, view)
    assert len({position for position, _, _ in seen}) == MOMENTS
    values: dict[tuple[str, str], set[str]] = {}
    for _, view, figures in seen:
        for name, value in figures.items():
            values.setdefault((view, name), set()).add(str(value))
    for figure, different in values.items():
        assert figure in CONSTANT or len(different) > FEW, (figure, different)
    assert str(("not known", "not known")) in values["engine", "rates"]
    assert fold.sums["steps"] > MOMENTS
