"""All figures of a live page belong to one position of the stream, and equal a second fold at that position."""

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
from kvscope.monitor.events.kinds import FIRST_FINISHED, Kind, Status
from kvscope.monitor.events.wire import Batch
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.query import QUESTIONS
from kvscope.monitor.text import counted, duration
from tests.lab import Lab
from tests.second_fold import SecondFold
from tests.web.parts import ENGINE

MOMENTS = 200
SLOW_STEPS = 0.03
"""A step of ten seconds leaves no rate of the last five, and old requests behind."""
VIEWS = ("blocks", "engine", "requests", "")
STATES = ("reserved", "free", "cached-idle", "running", "waiting", "finished", "UNACCOUNTED")
"""In the order of the map's palette."""


class MovingWatch(Pipeline):
    """A pipeline whose engine goes on under a drawn load after every answer, and all batches that it was fed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.batches: list[Batch] = []
        self._rng = random.Random(seed)
        self._lab = Lab(total=129, connector_share=0.3, faults=["leak.unaccounted:every=40"], seed=seed)
        self._fed = 0
        self.go_on = self._go_on
        """Of the live one: a snapshot's answers move it, too."""
        self.go_on()

    def _go_on(self) -> None:
        lab = self._lab
        for _ in range(self._rng.randint(1, 3)):
            if len(lab.scheduler.requests) < 24 and self._rng.random() < 0.6:
                lab.arrive(self._rng.randint(4, 60), max_tokens=self._rng.randint(1, 20))
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


class TimedFold(SecondFold):
    """The same with times: of arrivals, first admissions and first tokens, and of the sums of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self.arrived: dict[int, int] = {}
        self.admitted: dict[int, int] = {}
        self.first_token: dict[int, int] = {}
        self.tokens: list[tuple[int, int, int]] = []
        """When, tokens of output and computed, at least 0.1 s apart."""

    def add(self, batch: Batch) -> None:
        for event in batch.events():
            if event.kind in CLOCKS:
                self.now_ns = event.args[0]
            if event.kind == Kind.ARRIVED:
                self.arrived[event.request] = self.now_ns
            elif event.kind == Kind.ADMITTED:
                self.admitted.setdefault(event.request, self.now_ns)
            elif event.kind == Kind.FIRST_TOKEN:
                self.first_token.setdefault(event.request, self.now_ns)
        super().add(batch)
        self.wall_ns = batch.wall_ns
        if not self.tokens or batch.wall_ns - self.tokens[-1][0] >= 100_000_000:
            self.tokens.append((batch.wall_ns, self.sums["output_tokens"], self.sums["computed_tokens"]))

    def rates(self) -> tuple[str, str]:
        """Tokens of output, and computed, in a second of the last five."""
        recent = [point for point in self.tokens if point[0] >= self.wall_ns - 5_000_000_000]
        if len(recent) < 2:
            return "not known", "not known"
        first, last = recent[0], recent[-1]
        seconds = (last[0] - first[0]) / 1e9
        output, computed = (round((last[place] - first[place]) / seconds, 1) for place in (1, 2))
        return f"{output:,.0f} tok/s", f"{computed:,.0f} tok/s"

    def latency(self, ends: dict[int, int]) -> tuple[str, str]:
        """The 95th percentile, and the median with the requests, of those that came so far in the last five minutes."""
        since_ns = max(self.now_ns - 300_000_000_000, 1)
        waited = sorted(end - self.arrived[number] for number, end in ends.items() if end >= since_ns)
        if not waited:
            return "none in 5 min", ""
        p50, p95 = (duration(waited[-(-len(waited) * part // 100) - 1] / 1e9) for part in (50, 95))
        return p95, f"p50 {p50}, {counted(len(waited), 'request')}"


CLOCKS = (Kind.CLOCK, Kind.ARRIVED, Kind.STEP_LAUNCHED, Kind.STEP_COMPLETED, Kind.STARTED)


def states_of(fold: SecondFold) -> Counter[str]:
    """Blocks by state: one with several holders counts under the liveliest."""
    holders: dict[int, list[str]] = {}
    for number, table in fold.tables.items():
        status = fold.statuses.get(number, int(Status.FINISHED_STOPPED))
        for block in table:
            is_deferred = block in fold.deferred.get(number, ())
            ended = "finished" if is_deferred else "UNACCOUNTED"
            kind = "running" if status == Status.RUNNING else ended if status >= FIRST_FINISHED else "waiting"
            holders.setdefault(block, []).append(kind)
    for number, blocks in fold.deferred.items():
        for block in blocks:
            if block not in fold.tables.get(number, ()):
                holders.setdefault(block, []).append("finished")
    counts: Counter[str] = Counter(reserved=fold.reserved)
    for block in range(fold.total):
        kinds = holders.get(block, [])
        if fold.references[block] <= 0:
            counts["cached-idle" if fold.hashes.get(block, 0) else "free"] += 1
        else:
            counts[next((kind for kind in ("running", "waiting", "finished") if kind in kinds), "UNACCOUNTED")] += 1
    counts["free"] -= fold.reserved
    return +counts


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


def legend_of(page: Page) -> Counter[str]:
    labels = {shade.label: shade.state for shade in PALETTE_SHADES}
    counts: Counter[str] = Counter()
    for item in nodes(shown(page, "map"), "Li"):
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


def figures_of(page: Page, view: str) -> dict[str, Any]:
    """The figures that a page states, by name."""
    if view == "blocks":
        return {"legend": legend_of(page), "map": painted(page)}
    if view == "engine":
        tiles = [[text_of(part) for part in tile["children"]] for tile in nodes(shown(page, "summary"), "Div")]
        named = {tile[0]: tile for tile in tiles if len(tile) == 3}
        return {
            "running": int(named["Running"][1].replace(",", "")),
            "waiting": int(named["Waiting"][1].replace(",", "")),
            "preemptions": int(named["Preemptions"][1].replace(",", "")),
            "usage": named["Pool in use"][1],
            "rates": (named["Output"][1], named["Computed"][1]),
            **{name: tuple(named[f"{name}, p95"][1:]) for name in LATENCIES if f"{name}, p95" in named},
        }
    if view == "requests":
        rows = [row["children"] for row in nodes(shown(page, "requests"), "Tr")][1:]
        alive = [cells for cells in rows if "FINISHED" not in cells[1]["props"]["title"]]
        return {"blocks": {text_of(cells[0]): int(text_of(cells[4]).replace(",", "")) for cells in alive}}
    (row,) = (row for row in nodes(shown(page, "engines"), "Tr") if ENGINE in text_of(row["children"]))
    cells = [text_of(cell) for cell in row["children"]]
    running, waiting = re.findall(r"(\d+) running, (\d+) waiting", cells[2])[0]
    (bar,) = (div["aria-label"] for div in nodes(row["children"][1], "Div") if "aria-label" in div)
    latencies = {name: cells[place] for place, name in enumerate(LATENCIES, start=4)}
    return {"running": int(running), "waiting": int(waiting), "bar": bar, "output": cells[3], **latencies}


LATENCIES = ("First token", "Queue time")


def figures_at(fold: TimedFold, view: str) -> dict[str, Any]:
    """The same by the fold."""
    states = states_of(fold)
    alive = {number: status for number, status in fold.statuses.items() if status < FIRST_FINISHED}
    running = sum(status == Status.RUNNING for status in alive.values())
    queues = {"running": running, "waiting": len(alive) - running}
    if view == "blocks":
        return {"legend": states, "map": states}
    used = sum(fold.references[block] > 0 for block in range(fold.total))
    usage = f"{100 * used / (fold.total - fold.reserved):.1f} %"
    output, computed = fold.rates()
    latencies = dict(zip(LATENCIES, map(fold.latency, (fold.first_token, fold.admitted)), strict=True))
    if view == "engine":
        known = {name: latency for name, latency in latencies.items() if latency[1]}
        return (
            queues | known | {"preemptions": sum(fold.preempted.values()), "usage": usage, "rates": (output, computed)}
        )
    if view == "requests":
        return {"blocks": {number: len(fold.tables.get(number, ())) for number in alive}}
    bar = ", ".join(f"{states[shade.state]:,} {shade.label}" for shade in PALETTE_SHADES if states[shade.state])
    output = f"{output} {computed.removesuffix(' tok/s')} computed" if output != "not known" else output
    return (
        queues
        | {"bar": bar, "output": output}
        | {name: " ".join(latency).strip() for name, latency in latencies.items()}
    )


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
    fold = TimedFold()
    batches = iter(watch.batches)
    place = (0, -1)
    names = {number: name for batch in watch.batches for number, name in batch.texts.items()}
    for position, view, figures in seen:
        while place < place_in(position)[:2]:
            batch = next(batches)
            fold.add(batch)
            place = (batch.epoch, batch.sequence)
        expected = figures_at(fold, view)
        if view == "requests":
            expected = {"blocks": {names[number]: held for number, held in expected["blocks"].items()}}
        assert figures == expected, (position, view)
    assert len({position for position, _, _ in seen}) == MOMENTS
    rates = {figures["rates"] for _, view, figures in seen if view == "engine"}
    assert ("not known", "not known") in rates
    assert len(rates) > MOMENTS // 10
    assert fold.sums["steps"] > MOMENTS
