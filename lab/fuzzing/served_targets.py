"""What is served or asked over HTTP: a metrics page, an answer of a Prometheus server, a question to the service."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

from kvscope.monitor.contract.wire import decode as decode_frame
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.query import QUESTIONS
from kvscope.monitor.service.http_api import create_app
from kvscope.monitor.sources.metrics_page import BadPage, MetricsPage
from kvscope.monitor.sources.prometheus_history import BadHistory, PrometheusHistory
from kvscope.monitor.sources.source import SourceOptions

from ..recorded_pages import PAGE, page, rows
from . import mutations
from .fuzz_targets import DATA, FuzzTarget, ask_everything, lab_recordings


class ServedTarget(FuzzTarget):
    """An answer that a server on this machine gives, whatever it is asked."""

    def __init__(self, folder: Path, recordings: Sequence[bytes] = ()) -> None:
        super().__init__(folder, recordings)
        self._body = b""
        target = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(target._body)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(target._body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def read(self, content: bytes) -> str:
        self._body = content
        pipeline = Pipeline()
        refusal = self.scrape(pipeline)
        ask_everything(pipeline)
        return refusal or "read"

    def scrape(self, pipeline: Pipeline) -> str:
        """Read what is served into the pipeline; the name of the refusal, if it is refused."""
        raise NotImplementedError


class PageTarget(ServedTarget):
    """A metrics page."""

    outcomes = frozenset(("read", "BadPage"))

    def __init__(self, folder: Path, recordings: Sequence[bytes] = ()) -> None:
        super().__init__(folder, recordings)
        whole = gzip.decompress((DATA / "metrics-page.prom.gz").read_bytes())
        self.inputs = ["\n".join(PAGE).encode() + b"\n"] * 15 + [whole]

    def scrape(self, pipeline: Pipeline) -> str:
        source = MetricsPage(f"{self.url}/metrics")
        try:
            pipeline.feed(source.scrape())
            pipeline.feed(source.scrape())
        except BadPage as error:
            return "BadPage" if source.url in str(error) else "unnamed"
        finally:
            source.close()
        return ""


class PrometheusTarget(ServedTarget):
    """An answer of a Prometheus server."""

    outcomes = frozenset(("read", "BadHistory"))

    def __init__(self, folder: Path, recordings: Sequence[bytes] = ()) -> None:
        super().__init__(folder, recordings)
        self.inputs = [prometheus_answer("never-freed", 6), prometheus_answer("lockstep-collapse", 3)]

    def scrape(self, pipeline: Pipeline) -> str:
        source = PrometheusHistory(self.url, SourceOptions(timeout_s=10.0))
        try:
            pipeline.feed(source.poll())
            source.status()
        except BadHistory as error:
            return "BadHistory" if self.url in str(error) else "unnamed"
        return ""


def prometheus_answer(recording: str, moments: int) -> bytes:
    """Return what a Prometheus server that scraped a recording's page would answer."""
    series: dict[str, dict[str, Any]] = {}
    for row in rows(recording, 5.0)[:moments]:
        for line in page(row).splitlines():
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            if line.startswith("#") or not labels:
                continue
            metric = {"__name__": name, "instance": "vllm:8000", "job": "vllm"}
            metric |= dict(each.split("=", 1) for each in labels.replace('"', "").split(",") if "=" in each)
            found = series.setdefault(f"{name}{labels}", {"metric": metric, "values": []})
            found["values"].append([1_790_000_000 + row["t"], value])
    data = {"resultType": "matrix", "result": list(series.values())}
    return json.dumps({"status": "success", "data": data}).encode()


class QuestionTarget(FuzzTarget):
    """A question to the service's API: a path and a query string."""

    outcomes = frozenset(("200", "400", "404", "422"))

    def __init__(self, folder: Path, recordings: Sequence[bytes] = ()) -> None:
        super().__init__(folder, recordings)
        runs = lab_recordings()
        pipeline = Pipeline()
        for frame in map(decode_frame, runs[2]):
            if frame is not None:
                pipeline.feed([frame])
                last = frame
        pipeline.settle()
        self._app = create_app(pipeline, list)
        self._loop = asyncio.new_event_loop()
        values = ["", last.engine, "0", "1", "-1", "req-1", "owner", "heatmap", "1e308", "1e-300", "nan", "9" * 400]
        values += [f"{last.epoch}/{last.sequence}/0", "2026-01-01T00:00:00Z", "9999-12-31T23:59:59.9Z", "now", "-30m"]
        values += [code for finding in pipeline.findings() for code in (finding.code, finding.id)]
        self._values = values
        for question in QUESTIONS.values():
            for value in values:
                fields = question.parameters.__struct_fields__
                asked = "&".join(f"{name}={quote(last.engine if name == 'engine' else value)}" for name in fields)
                self.inputs.append(f"{question.route}?{asked}".encode())

    def damaged(self, rng: random.Random) -> bytes:
        question = rng.choice(list(QUESTIONS.values()))
        fields = [name for name in question.parameters.__struct_fields__ if rng.random() < 0.7]
        texts = {name: rng.choice(self._values) for name in fields}
        if "engine" in texts and rng.random() < 0.9:
            texts["engine"] = self._values[1]
        asked = "&".join(f"{name}={quote(text)}" for name, text in texts.items())
        return mutations.damaged_bytes([f"{question.route}?{asked}".encode(), *self.inputs[:1]], rng, 32 << 10)

    def large(self, rng: random.Random) -> bytes:
        return mutations.damaged_bytes([rng.choice(self.inputs) + rng.choice(self._values[1:]).encode() * 5000], rng)

    def read(self, content: bytes) -> str:
        path, _, asked = content.partition(b"?")
        status = self._loop.run_until_complete(self._answered(path, asked))
        if status not in (200, 307, 400, 404, 405, 422):
            raise AssertionError(f"answered {status}")
        return str(status)

    async def _answered(self, path: bytes, asked: bytes) -> int:
        statuses: list[int] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path.decode("utf-8", "replace"),
            "raw_path": path,
            "query_string": asked,
            "root_path": "",
            "headers": [(b"host", b"127.0.0.1")],
            "client": ("127.0.0.1", 50_000),
            "server": ("127.0.0.1", 8765),
            "state": {},
        }
        await self._app(scope, receive, send)  # which raises what escapes
        return statuses[0]

    def close(self) -> None:
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
