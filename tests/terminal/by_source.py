"""The same incidents by source: the table in docs/results.md, which `make docs` writes from here.

The event stream is that of kvscope's own engine in virtual time, brought to the same; everything else is what a real
vLLM had: its page scraped over HTTP, a Prometheus server that scraped it, its log.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kvscope.engine.bench.load_bench import BenchLoad
from kvscope.engine.bench.simulated_bench import bench_simulated
from kvscope.engine.config import EngineConfig
from kvscope.lab.recorded_pages import DATA, Row, page, rows, scraped
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.findings import FindingReport, severity_at_least
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.terminal.report import examine
from tests.dashboards.programs import answers, free_port, running, until

PAGE: Final = Path(__file__).parents[2] / "docs" / "results.md"
MARKED: Final = re.compile(r"(<!-- generated: by source -->\n).*?(<!-- /generated -->)", re.DOTALL)
NOTHING, NOT_SEEN = "nothing", "not seen"
Seen = dict[str, str]
"""By code: the verdict of each finding of warning or above, be it over."""


class Incident(NamedTuple):
    """What a recording is of, and how the simulated engine is brought to it, for how many seconds of its time."""

    happens: str
    load: BenchLoad
    config: EngineConfig
    seconds: float


INCIDENTS: Final = {
    "never-freed": Incident(
        "a KV connector keeps the blocks of a quarter of the finished requests",
        BenchLoad(num_prompts=40, request_rate=2, input_len=200, output_len=20),
        EngineConfig(num_gpu_blocks_override=513, kv_connector="host", faults=("leak.finished-held:every=4",)),
        40,
    ),
    "lockstep-collapse": Incident(
        "15 alike requests at a time, wave after wave",
        BenchLoad(num_prompts=45, max_concurrency=15, input_len=3500, output_len=300),
        EngineConfig(num_gpu_blocks_override=4500, faults=("collapse.lockstep",)),
        40,
    ),
    "frozen-engine": Incident(
        "the engine stands still while requests run",
        BenchLoad(num_prompts=6, input_len=200, output_len=400),
        EngineConfig(num_gpu_blocks_override=513, faults=("stuck.engine-stalled:after=50",)),
        20,
    ),
    "decode-growth-preempts": Incident(
        "a little more is asked for than the pool has; preemptions, and nothing wrong",
        BenchLoad(num_prompts=12, input_len=400, output_len=320),
        EngineConfig(num_gpu_blocks_override=513),
        20,
    ),
    "healthy-shared-prefix": Incident(
        "prompts that share a prefix; nothing wrong",
        BenchLoad(num_prompts=40, request_rate=2, prefix_len=300, input_len=60, output_len=60),
        EngineConfig(num_gpu_blocks_override=513),
        30,
    ),
}


# -------------------------------------------------------------------- by source


def from_the_stream() -> dict[str, Seen]:
    """Each incident as a recording of our engine's stream."""
    found = {}
    for name, incident in INCIDENTS.items():
        with tempfile.TemporaryDirectory() as folder:
            bench_simulated(incident.load, incident.config, incident.seconds, Path(folder))
            found[name] = reported([folder])
    return found


def from_the_page() -> dict[str, Seen]:
    """Each second's page, read at the time at which it was recorded."""
    found = {}
    for name in INCIDENTS:
        watch = Pipeline()
        watch.feed(scraped(rows(name)))
        watch.settle()
        found[name] = grave(watch.findings())
    return found


def from_prometheus(url: str) -> dict[str, Seen]:
    """What that server has stored of each."""
    return {name: reported([], url, name) for name in INCIDENTS}


def from_the_log() -> dict[str, Seen]:
    """Each server's log."""
    return {name: reported([str(DATA / f"{name}.log.gz")]) for name in INCIDENTS}


def reported(targets: Sequence[str], prometheus: str = "", of: str = "") -> Seen:
    """What the doctor says of these, or of one engine that a Prometheus server has."""
    report = examine(targets, Settings(), prometheus=[prometheus] if prometheus else [])
    assert [target.status for target in report.targets] == ["ok"], report.targets
    return grave([finding for finding in report.findings if of in finding.engine])


def grave(findings: Sequence[FindingReport]) -> Seen:
    """What is no mere information."""
    return {finding.code: finding.verdict for finding in findings if severity_at_least(finding.severity, "warning")}


# -------------------------------------------------------------------- a Prometheus server


def openmetrics(series: dict[str, list[Row]], ended_s: float) -> str:
    """The recordings' pages as OpenMetrics, each ending then, with the labels that a scrape adds."""
    names: dict[str, list[str]] = {}
    for instance, moments in series.items():
        for row in moments:
            at_s = ended_s - moments[-1]["t"] + row["t"]
            for line in page(row).splitlines():
                if line.startswith("vllm:") and "_created" not in line:
                    labelled, _, value = line.rpartition(" ")
                    name, _, labels = labelled.partition("{")
                    text = f'{name}{{instance="{instance}",job="vllm",{labels} {value} {at_s:.3f}'
                    names.setdefault(name, []).append(text)
    typed = [text for name in names for text in (f"# TYPE {name} unknown", *names[name])]
    return "\n".join([*typed, "# EOF", ""])


@contextmanager
def remembered(series: dict[str, list[Row]], server: str, tool: str, folder: Path) -> Iterator[str]:
    """A Prometheus server that has scraped these until a minute ago; `tool` is its promtool."""
    (folder / "history.om").write_text(openmetrics(series, time.time() - 60))
    (folder / "prometheus.yml").write_text("{}")
    own = f"127.0.0.1:{free_port()}"
    blocks = [tool, "tsdb", "create-blocks-from", "openmetrics", folder / "history.om", folder / "data"]
    with running(blocks, folder / "promtool.log") as process:
        assert process.wait(60) == 0, (folder / "promtool.log").read_text()
    command = [
        server,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={own}",
    ]
    with running(command, folder / "prometheus.log") as process:
        until(lambda: answers(f"http://{own}/-/ready"), "Prometheus is ready", process)
        yield f"http://{own}"


# -------------------------------------------------------------------- the table

SOURCES: Final = ("its event stream", "its page", "Prometheus", "its log")


def table(found: Sequence[dict[str, Seen]]) -> str:
    """A row for each code that any source tells of an incident; a column for each of SOURCES."""
    lines = [" | ".join(("| incident | finding", *SOURCES)) + " |", "|---|---" + "|---" * len(SOURCES) + "|"]
    for name, incident in INCIDENTS.items():
        codes = sorted({code for by_incident in found for code in by_incident[name]})
        for code in codes or [""]:
            cells = [by_incident[name].get(code, NOT_SEEN if code else NOTHING) for by_incident in found]
            finding = f"[{code}](runbooks/{code}.md)" if code else NOTHING
            lines.append(" | ".join((f"| {name}: {incident.happens}", finding, *cells)) + " |")
    return "\n".join(lines)


def in_the_docs(source: str) -> dict[str, Seen]:
    """What the table says of one source."""
    found: dict[str, Seen] = {name: {} for name in INCIDENTS}
    written = MARKED.search(PAGE.read_text(encoding="utf-8"))
    assert written is not None
    head, _, *lines = (line.strip("| ").split(" | ") for line in written[0].splitlines()[1:-1])
    for line in lines:
        row = dict(zip(head, line, strict=True))
        code = re.search(r"\[(.+?)\]", row["finding"])
        if code and row[source] != NOT_SEEN:
            found[row["incident"].partition(":")[0]][code[1]] = row[source]
    return found


def main() -> None:
    """Write it."""
    server, tool = shutil.which("prometheus"), shutil.which("promtool")
    if server is None or tool is None:
        raise SystemExit(f"{PAGE.name} is left as it is: prometheus is not here (apt-get install prometheus)")
    series = {f"{name}:8000": rows(name) for name in INCIDENTS}
    with tempfile.TemporaryDirectory() as folder, remembered(series, server, tool, Path(folder)) as url:
        found = [from_the_stream(), from_the_page(), from_prometheus(url), from_the_log()]
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(MARKED.sub(lambda marked: f"{marked[1]}{table(found)}\n{marked[2]}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
