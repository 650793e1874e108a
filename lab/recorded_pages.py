"""Metrics pages of a real vLLM, as they were at each moment of a recording, and a server that serves them."""

from __future__ import annotations

import csv
import gzip
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from kvscope.monitor.contract.samples import Fact, Sample
from kvscope.monitor.sources.metrics_page import MetricsPage

DATA: Final = Path(__file__).parent.parent / "tests" / "data"
COLUMNS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "wait_capacity": 'vllm:num_requests_waiting_by_reason{reason="capacity"}',
    "wait_deferred": 'vllm:num_requests_waiting_by_reason{reason="deferred"}',
    "kv_usage": "vllm:kv_cache_usage_perc",
    "preemptions": "vllm:num_preemptions_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "gen_tokens": "vllm:generation_tokens_total",
    "pc_queries": "vllm:prefix_cache_queries_total",
    "pc_hits": "vllm:prefix_cache_hits_total",
    "ok_stop": 'vllm:request_success_total{finished_reason="stop"}',
    "ok_length": 'vllm:request_success_total{finished_reason="length"}',
    "ok_abort": 'vllm:request_success_total{finished_reason="abort"}',
    "ok_error": 'vllm:request_success_total{finished_reason="error"}',
    "iter_count": "vllm:iteration_tokens_total_count",
    "cpu_s": "process_cpu_seconds_total",
}
Row = dict[str, float]


def whole_page() -> str:
    """A page of vLLM 0.32.0, byte for byte: the last of never-freed."""
    return gzip.decompress((DATA / "metrics-page.prom.gz").read_bytes()).decode()


def _shorter(text: str) -> list[str]:
    """The page without what only makes it long: histograms but for the one that counts steps, and Python's own."""
    long = r"vllm:\w+_(?:bucket|created|seconds_count|seconds_sum)|vllm:request_(?!success)|python|process_(?!cpu)|http"
    return [line for line in text.splitlines() if not re.match(f"(?:# \\w+ )?(?:{long})", line)]


PAGE = _shorter(whole_page())


def rows(name: str, every_s: float = 1.0, first: int = 0) -> list[Row]:
    """A recording's figures, `t` seconds into it, no closer together than `every_s`, from the `first` on."""
    with gzip.open(DATA / f"{name}.metrics.csv.gz", "rt") as file:
        found = [{column: float(value or "nan") for column, value in row.items()} for row in csv.DictReader(file)]
    picked = found[first : first + 1]
    for row in found[first:]:
        if row["t"] - picked[-1]["t"] >= every_s - 0.01:
            picked.append(row)
    return picked


def front_end_cpu_s(row: Row) -> float:
    """What a front end takes: 20 ms a scrape each second, and 1 ms for what a step has made."""
    return round(8.4 + 0.02 * row["t"] + 0.001 * row["iter_count"], 2)


def page(row: Row) -> str:
    """The page as it was then, shorter; what the recording does not have is as at never-freed's end."""
    row = {"cpu_s": front_end_cpu_s(row), **row}
    values = {name: row[column] for column, name in COLUMNS.items()}
    lines = []
    for line in PAGE:
        series, _, _ = line.rpartition(" ")
        name, _, labels = series.partition("{")
        reason = re.search(r'(?:finished_)?reason="\w+"', labels)
        value = values.get(f"{name}{{{reason[0]}}}" if reason else name)
        lines.append(line if line.startswith("#") or value is None else f"{series} {value}")
    return "\n".join(lines) + "\n"


class Served(ThreadingHTTPServer):
    """Answers every request with what `answer` is then: a page, what makes it, or a status code."""

    answer: str | int | Callable[[], str] = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/metrics"


class _Handler(BaseHTTPRequestHandler):
    server: Served

    def do_GET(self) -> None:
        answer = self.server.answer
        answer = answer() if callable(answer) else answer
        body = answer.encode() if isinstance(answer, str) else b""
        self.send_response(200 if isinstance(answer, str) else answer)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@contextmanager
def served(answer: str | int | Callable[[], str] = "") -> Iterator[Served]:
    with Served(("127.0.0.1", 0), _Handler) as server:
        server.answer = answer
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class At:
    """A clock that stands where it is put, in seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def time_ns(self) -> int:
        return round(self.seconds * 1e9)

    def monotonic_ns(self) -> int:
        return self.time_ns()


BEGAN_S = 1_790_000_000.0


def scraped(all_rows: list[Row], change: Callable[[str], str] = lambda text: text) -> list[Sample | Fact]:
    """What is read of the pages, scraped over HTTP each at its own time; `change` is done to each."""
    records: list[Sample | Fact] = []
    clock = At(BEGAN_S)
    with served() as server:
        reader = MetricsPage(server.url, clock=clock)
        try:
            for row in all_rows:
                clock.seconds = BEGAN_S + row["t"]
                server.answer = change(page(row))
                records += reader.scrape()
        finally:
            reader.close()
    return records
