"""The past of engines that a Prometheus server scraped, with nobody watching.

Asked for are the series as they were stored (a range selector in an instant query): each sample at its own time, a gap
as a gap, a counter's reset where it was. Whatever answers to Prometheus's HTTP API will do.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Annotated, Final

import httpx
import msgspec

from kvscope.monitor.errors import KvscopeError
from kvscope.monitor.events.samples import Fact, Sample
from kvscope.monitor.sources.exposition import (
    CONFIGURATION,
    FIELDS,
    NONE_KNOWN,
    Engine,
    Figures,
    Sampler,
    address_of,
    dialect_of,
    engine_of,
    facts_of,
    put,
    shown,
)

UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class BadHistory(KvscopeError):
    """The server cannot be asked, or has nothing of an engine; the message says why and what to do."""


AtSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e10)]


class _Series(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[AtSeconds, str]]


class _Data(msgspec.Struct):
    result: list[_Series]


class _Answer(msgspec.Struct):
    status: str
    data: _Data | None = None
    error: str = ""


def seconds(text: str) -> int:
    """`90s`, `30m`, `2h`, `1d12h` in seconds. Raises ValueError."""
    if not re.fullmatch(r"(\d{1,6}[smhdw])+", text):
        raise ValueError(f"{text!r} is no length of time such as 30m, 2h or 1d12h")
    return sum(int(number) * UNITS[unit] for number, unit in re.findall(r"(\d+)([smhdw])", text))


def history(url: str, since_s: int, timeout_s: float = 10.0, until_s: float | None = None) -> list[Sample | Fact]:
    """What the server at `url` stored of engines in the `since_s` seconds until `until_s` (Unix time; None: now), in
    order. Raises BadHistory, and BadTarget if `url` is no address.
    """
    address_of(url)
    wanted = "|".join((*FIELDS, CONFIGURATION))
    series = _ask(url, f'{{__name__=~"{wanted}"}}[{since_s}s]', timeout_s, time.time() if until_s is None else until_s)
    try:
        records = sorted(_records(series), key=lambda found: found[0])
    except ValueError as error:
        raise BadHistory(f"{shown(url)} has a sample that is no number: {error}") from error
    if not records:
        raise BadHistory(
            f"{shown(url)}: of these {since_s} s {NONE_KNOWN}. Is the engine's page among its scrape targets?"
        )
    return [record for _, record in records]


def _records(all_series: list[_Series]) -> Iterator[tuple[int, Sample | Fact]]:
    """Each with its time, in ns."""
    moments: dict[Engine, dict[int, Figures]] = {}
    names: dict[Engine, set[str]] = {}
    configurations: dict[tuple[str, str], dict[str, str]] = {}
    for series in all_series:
        name = series.metric.pop("__name__", "")
        engine = engine_of(series.metric, series.metric.get("instance", "prometheus"))
        if name == CONFIGURATION:
            configurations[engine.instance, engine.rank] = series.metric
            continue
        names.setdefault(engine, set()).add(name)
        for at_s, value in series.values:
            put(moments.setdefault(engine, {}).setdefault(round(at_s * 1000), {}), name, series.metric, float(value))
    for engine, figures_at in moments.items():
        if not any(figures_at.values()):
            continue
        sampler = Sampler(engine, "prometheus")
        began_ns = min(figures_at) * 1_000_000
        configuration = configurations.get((engine.instance, engine.rank), {})
        for fact in facts_of(engine, str(began_ns), dialect_of(names[engine]), configuration):
            yield began_ns, fact
        for at_ms, figures in sorted(figures_at.items()):
            if figures:
                yield at_ms * 1_000_000, sampler.sample(at_ms * 1_000_000, f"{at_ms / 1000:.3f}", figures)


def _ask(url: str, query: str, timeout_s: float, at_s: float) -> list[_Series]:
    try:
        response = httpx.get(
            f"{url.rstrip('/')}/api/v1/query",
            params={"query": query, "time": at_s},
            timeout=timeout_s,
            trust_env=False,
            follow_redirects=True,
        )
    except httpx.TimeoutException as error:
        raise BadHistory(
            f"{shown(url)} did not answer within {timeout_s:g} s: ask for less (--since) or wait longer (--timeout)"
        ) from error
    except httpx.HTTPError as error:
        raise BadHistory(f"{shown(url)} does not answer ({error}): is a Prometheus server running there?") from error
    try:
        answer = msgspec.json.decode(response.content, type=_Answer)
    except msgspec.DecodeError as error:
        raise BadHistory(
            f"{shown(url)} does not answer as a Prometheus server does ({response.status_code}). Give its base"
            " address, such as http://127.0.0.1:9090"
        ) from error
    if answer.status != "success" or answer.data is None:
        raise BadHistory(f"{shown(url)} refuses the query: {answer.error or answer.status}")
    return answer.data.result
