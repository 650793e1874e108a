"""Forty engines that are watched by their metrics alone, by pages of a real vLLM whose figures change as they did.

Rules and panels of a real Prometheus have data, what only an event stream has says so, and faulty engines are found.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import pytest

from kvscope.dashboards.grafana.pages import GENERATED_PAGES, PAGES
from kvscope.lab.recorded_pages import COLUMNS, Row, Served, page, rows, scraped, served
from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.outputs.prometheus import WatchCollector
from kvscope.monitor.questions.availability import FAMILIES_WITHOUT_STREAM
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
    assert {sample.name for sample in of_engine} <= FAMILIES_WITHOUT_STREAM
    finds = {"kvscope_findings", "kvscope_pool_full_seconds"}  # a healthy engine has neither
    assert {sample.name for sample in of_engine} >= FAMILIES_WITHOUT_STREAM - finds
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


ENGINES: Final = 40
DIES_AFTER: Final = 10
"""Scrapes."""
COUNTERS: Final = COLUMNS.keys() - {"running", "waiting", "wait_capacity", "wait_deferred", "kv_usage", "cpu_s"}


def over_and_over(recording: list[Row], first: int = 0) -> Iterator[Row]:
    """Yield the rows from the `first` on, then all of them again and again; counters and time only grow."""
    base = dict.fromkeys((*COUNTERS, "t"), 0.0)
    while True:
        for row in recording[first:]:
            yield row | {name: row[name] + base[name] for name in base}
        base = {name: value + recording[-1][name] for name, value in base.items()}
        first = 0


def and_stays(recording: list[Row], **queued: float) -> Iterator[Row]:
    """Yield the rows, then the last of them for ever, with these requests queued behind it."""
    yield from recording
    for seconds in count(1):
        yield recording[-1] | queued | {"t": recording[-1]["t"] + seconds}


def fleet() -> dict[str, list[Iterator[Row]]]:
    """The rows of each engine, by what it is."""
    healthy = rows("healthy-shared-prefix")
    return {
        "leaks": [and_stays([row for row in rows("never-freed") if row["t"] >= 80])],
        "frozen": [and_stays(rows("frozen-engine")[:12], waiting=5.0, wait_capacity=5.0)],
        "preempts": [and_stays(rows("decode-growth-preempts"))],
        "dies": [over_and_over(healthy, 2)],
        "healthy": [over_and_over(healthy, number % len(healthy)) for number in range(ENGINES - 4)],
    }


class Scene(NamedTuple):
    """A Prometheus, its process, and the addresses of the engines by what each is."""

    seen: Prometheus
    process: subprocess.Popen[bytes]
    addresses: dict[str, list[str]]

    def until(self, ready: Callable[[], Any], what: str) -> Any:
        """The first true answer."""
        return until(ready, what, self.process)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One that scrapes a service that scrapes them all, whose figures change as they did; one dies after a while."""
    folder = tmp_path_factory.mktemp("without-stream")
    server = program("prometheus", "prometheus")
    stop = threading.Event()

    def go_on(pages: list[tuple[Served, Iterator[Row]]], dies: Served) -> None:
        for turn in count():
            for page_server, engine in pages:
                page_server.answer = page(next(engine))
            if turn == DIES_AFTER:
                dies.shutdown()
                dies.server_close()
            if stop.wait(1.0):
                return

    with ExitStack() as stack:
        servers = {what: [(stack.enter_context(served()), one) for one in each] for what, each in fleet().items()}
        pages = [one for each in servers.values() for one in each]
        ((dies, _),) = servers["dies"]
        for page_server, engine in pages:
            page_server.answer = page(next(engine))
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
        until(lambda: len(seen.label("kvscope_engine_info", "engine")) == ENGINES, "all engines", process)
        # Only now, when the service has a first sample of each: what stands still must have been seen to move.
        turning = threading.Thread(target=go_on, args=(pages, dies))
        turning.start()
        stack.callback(turning.join)
        stack.callback(stop.set)
        addresses = {what: [urlsplit(one.url).netloc for one, _ in each] for what, each in servers.items()}
        yield Scene(seen, process, addresses)


def panels() -> list[tuple[str, list[str], str]]:
    """The panels of the five boards: title, expressions, and what each says without data."""
    return [
        (
            panel["title"],
            [target["expr"] for target in panel["targets"]],
            panel["fieldConfig"]["defaults"].get("noValue", ""),
        )
        for name in PAGES
        if name != "vllm"
        for panel in json.loads((GENERATED_PAGES / f"{name}.json").read_text())["panels"]
        if panel["type"] != "row"
    ]


FOUND: Final = {
    "leaks": {"leak.finished-held"},
    "frozen": {"stuck.engine-stalled"},
    "dies": {"blind.reader-failed"},
    "preempts": set[str](),  # a little more is asked for than its pool has: its panels have it, and nothing is wrong
    "healthy": set[str](),
}
"""Codes of the alerts of each."""


def alerts_of(scene: Scene, what: str) -> set[str]:
    """Codes of the alerts that have fired about the engines of this kind."""
    firing = (
        f'ALERTS{{alertname="KvscopeFinding", alertstate="firing", engine=~".*({"|".join(scene.addresses[what])}).*"}}'
    )
    return scene.seen.label(firing, "code")


def test_of_forty_engines_those_with_a_fault_are_found_and_no_other(scene: Scene) -> None:
    scene.until(lambda: all(FOUND[what] <= alerts_of(scene, what) for what in FOUND), "all are found")
    assert {what: alerts_of(scene, what) for what in FOUND} == FOUND
    in_time = 'kvscope_findings{severity!="info"}'
    assert len(scene.seen.label(in_time, "engine")) == sum(map(bool, FOUND.values()))
    others = scene.seen.series('ALERTS{alertname!="KvscopeFinding", alertstate="firing"}')
    about = {(one["metric"]["alertname"], urlsplit(one["metric"].get("source", "")).netloc) for one in others}
    (dead,) = scene.addresses["dies"]
    right = {("KvscopeWorkerFailing", ""), ("KvscopeSourceNotInStep", dead), ("KvscopeBlind", "")}
    assert about <= right, about


def test_a_panel_has_data_or_says_what_it_needs(scene: Scene) -> None:
    seen = scene.seen

    def has_data(expressions: list[str]) -> bool:
        return any(not math.isnan(value) for expr in expressions for value in seen.values(filled_in(expr)))

    every = panels()
    drawn = [(title, expressions) for title, expressions, says in every if not says.startswith("needs ")]
    needing = [expressions for _, expressions, says in every if says.startswith("needs ")]
    assert len(drawn) > 10
    assert needing

    def without() -> list[str]:
        return [title for title, expressions in drawn if not has_data(expressions)]

    try:
        scene.until(lambda: not without(), "every panel has data")
    except AssertionError as error:
        raise AssertionError(f"no data in {without()}") from error
    assert not any(map(has_data, needing))


def test_no_rule_calls_kvscope_blind(scene: Scene) -> None:
    seen = scene.seen
    scene.until(lambda: seen.values("engine:kvscope_pool_usage:ratio"), "the rules are evaluated")
    firing = 'ALERTS{alertname="KvscopeBlind", alertstate="firing"}'

    def is_over() -> bool:
        """Nothing fired for some seconds: before the engines were there, it was right to."""
        return all(float(one["values"][-1][0]) < time.time() - 5 for one in seen.series(firing))

    scene.until(is_over, "kvscope is not called blind")
    assert seen.label(firing, "why") <= {"no engine was ever received", "kvscope does not answer"}
