"""Engines that are watched by their metrics alone, four pages of a real vLLM: the rules and panels of a real Prometheus
have their figures, and what only an event stream has says so.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from kvscope.dashboards.grafana.pages import GENERATED_PAGES, PAGES
from kvscope.dashboards.grafana.panels import WITHOUT_STREAM
from kvscope.lab.recorded_pages import Served, page, rows, scraped, served
from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.outputs.prometheus import WatchCollector
from kvscope.monitor.questions.pipeline import Pipeline
from tests.dashboards.programs import (
    TOKEN,
    Prometheus,
    answers,
    free_port,
    program,
    quick_prometheus,
    running,
    until,
)
from tests.dashboards.scene import filled_in

RECORDINGS: Final = ("healthy-shared-prefix", "never-freed", "decode-growth-preempts", "frozen-engine")
NEEDS_STREAM: Final = "needs an event stream"


def named(expressions: list[str]) -> set[str]:
    return {name for expr in expressions for name in re.findall(r"kvscope_\w+", expr)}


@pytest.mark.usefixtures("real_parts")
@pytest.mark.parametrize("recording", RECORDINGS)
def test_a_page_has_what_is_said_to_need_no_stream(recording: str) -> None:
    watch = Pipeline()
    watch.feed(scraped(rows(recording, 5.0)))
    (ledger,) = watch.fleet.engines.values()
    series = [sample for family in WatchCollector(watch).collect() for sample in family.samples]
    of_engine = [sample for sample in series if sample.labels.get("engine") == ledger.engine]
    assert {sample.name for sample in of_engine} <= WITHOUT_STREAM
    finds = {"kvscope_findings", "kvscope_pool_full_seconds"}  # a healthy engine has neither
    assert {sample.name for sample in of_engine} >= WITHOUT_STREAM - finds
    values = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in of_engine}
    assert len(values) == len(of_engine)
    last = ledger.samples[-1]
    told = {name: sum(value for (of, *_), value in values.items() if of == f"kvscope_{name}") for name in NAMES}
    assert told == {name: getattr(last, field) for name, field in NAMES.items()}
    assert sum(value for (of, *_), value in values.items() if of == "kvscope_requests") == last.running + last.waiting  # type: ignore[operator]


NAMES: Final = {
    "pool_usage_ratio": "usage",
    "preemptions_total": "preemptions",
    "output_tokens_total": "generation_tokens",
    "steps_total": "steps",
    "prefix_cache_hit_tokens_total": "prefix_hits",
    "prefix_cache_queried_tokens_total": "prefix_queries",
}


def test_what_a_sample_does_not_say_is_absent() -> None:
    watch = Pipeline()
    assert not [
        family.name
        for family in WatchCollector(watch).collect()
        if family.name.startswith("kvscope_engine")
        if family.samples
    ]
    watch.feed([Sample("log@host:0/0", "1", at_ns=1, running=2)])
    series = [sample for family in WatchCollector(watch).collect() for sample in family.samples]
    told = {sample.name for sample in series if sample.labels.get("engine")}
    assert told == {
        "kvscope_engine_info",
        "kvscope_engine_last_heard_timestamp_seconds",
        "kvscope_engine_restarts_total",
        "kvscope_engine_status",
        "kvscope_requests",
    }


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, subprocess.Popen[bytes]]]:
    """One, and its process, that scrapes a service that scrapes the four, whose figures change as they did."""
    folder = tmp_path_factory.mktemp("without-stream")
    server = program("prometheus", "prometheus")
    stop = threading.Event()

    def go_on(pages: list[tuple[Served, list[str]]]) -> None:
        for turn in range(max(len(texts) for _, texts in pages)):
            for page_server, texts in pages:
                page_server.answer = texts[min(turn, len(texts) - 1)]
            if stop.wait(1.0):
                return

    with ExitStack() as stack:
        pages = [(stack.enter_context(served()), [page(row) for row in rows(name)]) for name in RECORDINGS]
        turning = threading.Thread(target=go_on, args=(pages,))
        turning.start()
        stack.callback(turning.join)
        stack.callback(stop.set)
        port, own = free_port(), f"127.0.0.1:{free_port()}"
        service = [str(Path(sys.executable).parent / "monitor"), "serve", "--port", str(port), "--token", TOKEN]
        service += [argument for page_server, _ in pages for argument in ("--metrics", page_server.url)]
        stack.enter_context(running(service, folder / "service.log"))
        config = quick_prometheus(folder, f"127.0.0.1:{port}")
        command = [
            server,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={own}",
        ]
        process = stack.enter_context(running(command, folder / "prometheus.log"))
        seen = Prometheus(f"http://{own}")
        until(lambda: answers(f"{seen.url}/-/ready"), "Prometheus is ready", process)
        until(lambda: len(seen.label("kvscope_engine_info", "engine")) == len(RECORDINGS), "all engines", process)
        yield seen, process


def of_engines() -> list[tuple[str, list[str], str]]:
    """The panels about engines: title, expressions, and what each says without data."""
    return [
        (
            panel["title"],
            [target["expr"] for target in panel["targets"]],
            panel["fieldConfig"]["defaults"].get("noValue", ""),
        )
        for name in PAGES
        if name != "vllm"
        for panel in json.loads((GENERATED_PAGES / f"{name}.json").read_text())["panels"]
        if panel["type"] != "row" and any("engine=~" in target["expr"] for target in panel["targets"])
    ]


def test_a_panel_has_data_or_says_that_it_needs_a_stream(
    prometheus: tuple[Prometheus, subprocess.Popen[bytes]],
) -> None:
    seen, process = prometheus
    drawn = [
        (title, expressions)
        for title, expressions, says in of_engines()
        if says != NEEDS_STREAM and named(expressions) != {"kvscope_findings"}  # nothing may be found in this minute
    ]
    assert len(drawn) > 10

    def has_data(expr: str) -> bool:
        return any(not math.isnan(value) for value in seen.values(filled_in(expr)))

    def without() -> list[str]:
        return [title for title, expressions in drawn if not any(map(has_data, expressions))]

    try:
        until(lambda: not without(), "every panel has data", process)
    except AssertionError as error:
        raise AssertionError(f"no data in {without()}") from error
    needing = [expressions for _, expressions, says in of_engines() if says == NEEDS_STREAM]
    assert not any(has_data(expr) for expressions in needing for expr in expressions)


def test_no_rule_calls_kvscope_blind(prometheus: tuple[Prometheus, subprocess.Popen[bytes]]) -> None:
    seen, process = prometheus
    until(lambda: seen.values("engine:kvscope_pool_usage:ratio"), "the rules are evaluated", process)
    firing = 'ALERTS{alertname="KvscopeBlind", alertstate="firing"}'

    def is_over() -> bool:
        """Nothing fired for some seconds: before the engines were there, it was right to."""
        return all(float(one["values"][-1][0]) < time.time() - 5 for one in seen.series(firing))

    until(is_over, "kvscope is not called blind", process)
    assert seen.label(firing, "why") <= {"no engine was ever received", "kvscope does not answer"}
