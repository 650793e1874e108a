"""/metrics of a lab with a leak: what is on the page, what must not be, and that promtool has nothing to say of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.kinds import FIRST_FINISHED, Stage
from kvscope.monitor.contract.kinds import Status as RequestStatus
from kvscope.monitor.outputs.alerting.message import AlertFigures, ReceiverFigures
from kvscope.monitor.outputs.gpu import OTHER_PROCESSES, by_engine, gpu_families, here
from kvscope.monitor.outputs.prometheus import METRIC_HOLDERS, WatchCollector
from kvscope.monitor.outputs.prometheus.ledger_metrics import CONFIGURATION_LABELS
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.schema import SourceView

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
FAULTS = ("leak.finished-held:limit=2", "leak.unaccounted")
LABELS = {
    "engine",
    "holder",
    "state",
    "reason",
    "code",
    "severity",
    "verdict",
    "stage",
    "limit",
    "status",
    "outcome",
    "part",
    "suggestion",
    "tier",
    "source",
    "supplier",
    "receiver",
    "signal",
    "le",
    *CONFIGURATION_LABELS,
}
"""All that a metric may be told apart by: each has few values, whatever the load."""
SOURCE = SourceView(
    "tcp://127.0.0.1:5757",
    "lab@127.0.0.1:0/0",
    in_step=True,
    bad_frames=1,
    filled_from={"ring": 3, "journal": 2},
    error="",
    lag_s=0.25,
    cpu_s=1.5,
)

ALERTS = AlertFigures(
    [ReceiverFigures("webhook-1", True, pending=2, oldest_pending_s=7.5, ended={"given-up": 3}, failed_tries=4)],
    open=5,
    silences=6,
)


@pytest.fixture
def lab() -> Lab:
    """Two requests finished and held, one aborted whose blocks stay, one that can never fit with one behind it."""
    lab = Lab(total=65, connector_share=1.0, faults=FAULTS)
    for _ in range(2):
        lab.arrive(10, max_tokens=4)
    lab.run_until_idle()
    aborted = lab.arrive(10, max_tokens=30)
    lab.step()
    lab.abort(aborted)
    lab.arrive(10, max_tokens=2000)
    lab.step()
    lab.arrive(400)
    lab.arrive(5)
    lab.step()
    return lab


@pytest.fixture
def watch(lab: Lab) -> Pipeline:
    """What a service knows of it once every grace is over."""
    for _ in range(60):
        lab.clock.sleep(0.25)
        lab.scheduler.take_completions()  # the connector is asked, and says nothing
        lab.heartbeat()
    watch = Pipeline()
    watch.feed(lab.frames)
    return watch


def families(watch: Pipeline) -> dict[str, Metric]:
    """What is said of engines; this process is always there."""
    found = {family.name: family for family in WatchCollector(watch).collect()}
    return {name: family for name, family in found.items() if name.startswith("kvscope_")}


def by_labels(family: Metric, *labels: str) -> Counter[tuple[str, ...]]:
    """The family's values, summed by these labels."""
    totals: Counter[tuple[str, ...]] = Counter()
    for sample in family.samples:
        totals[tuple(sample.labels[label] for label in labels)] += sample.value
    return totals


def page(watch: Pipeline, sources: Iterable[SourceView] = (), alerts: AlertFigures | None = None) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WatchCollector(watch, lambda: sources, lambda: alerts or AlertFigures()))
    return generate_latest(registry)


def test_promtool_finds_nothing_to_say_of_the_page(watch: Pipeline) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here: apt-get install prometheus")
    watch.fleet.engines["lab@127.0.0.1:0/0"].state.memory = list(range(1, 15))
    stated = page(watch, [SOURCE], ALERTS)
    reported = subprocess.run([promtool, "check", "metrics"], input=stated, capture_output=True, check=False)
    assert (reported.returncode, reported.stdout, reported.stderr) == (0, b"", b"")


def test_the_balance_is_the_pools_and_sums_to_its_total(lab: Lab, watch: Pipeline) -> None:
    blocks = by_labels(families(watch)["kvscope_blocks"], "holder")
    assert set(blocks) == {(holder,) for holder in METRIC_HOLDERS}
    assert sum(blocks.values()) == lab.pool.total
    assert blocks["finished",] == sum(len(lab.blocks_of(number)) for number in lab.scheduler.deferred) > 0
    assert blocks["unaccounted",] > 0


def test_requests_by_state_and_reason(lab: Lab, watch: Pipeline) -> None:
    requests = by_labels(families(watch)["kvscope_requests"], "state", "reason")
    living = Counter(request.status.name for request in lab.scheduler.requests.values() if not request.is_finished)
    shown = Counter[str]()
    for (state, _), count in requests.items():
        if RequestStatus[state] < FIRST_FINISHED:
            shown[state] += int(count)
    assert +shown == living
    assert requests["WAITING", "KV_BLOCKS"] == 1
    assert requests["WAITING", "BEHIND_HEAD"] == 1
    held = {reason: count for (state, reason), count in requests.items() if RequestStatus[state] >= FIRST_FINISHED}
    assert set(held) == {"FREE_DEFERRED", "UNACCOUNTED"}


def test_findings_are_those_that_fire(watch: Pipeline) -> None:
    shown = by_labels(families(watch)["kvscope_findings"], "code", "severity", "verdict")
    fire = Counter((found.code, found.severity, found.verdict) for found in watch.findings("firing"))
    assert shown == fire
    assert {"leak.finished-held", "leak.unaccounted", "stuck.never-fits"} <= {code for code, _, _ in shown}


def test_no_request_and_no_block_is_a_label(lab: Lab, watch: Pipeline) -> None:
    samples = [sample for family in families(watch).values() for sample in family.samples]
    assert {label for sample in samples for label in sample.labels} <= LABELS
    ids = {request.id for request in lab.scheduler.requests.values()}
    assert ids.isdisjoint(value for sample in samples for value in sample.labels.values())


def test_more_requests_make_no_more_series() -> None:
    more = Lab(total=200)
    for _ in range(50):
        more.arrive(10)
    more.run_until_idle()
    busy = Pipeline()
    busy.feed(more.frames)
    lines = len(page(busy).splitlines())
    for _ in range(50):
        more.arrive(10)
    more.run_until_idle()
    busy.feed(more.frames)
    assert len(page(busy).splitlines()) == lines


def test_lost_batches_are_counted_by_stage_and_mark_the_ledger(lab: Lab) -> None:
    watch = Pipeline()
    lost = lab.frames[-2]
    watch.feed(frame for frame in lab.frames if frame is not lost)
    found = families(watch)
    by_stage = by_labels(found["kvscope_stream_batches_lost"], "stage")
    assert by_stage == {(stage.name.lower(),): int(stage is Stage.TRANSPORT) for stage in Stage}
    assert [sample.value for sample in found["kvscope_ledger_exact"].samples] == [0]


def test_an_engine_that_stopped_is_told_from_one_that_fell_silent(lab: Lab, watch: Pipeline) -> None:
    assert [sample.value for sample in families(watch)["kvscope_engine_stopped"].samples] == [0]
    lab.log.stopped()
    watch.feed(lab.flush())
    assert [sample.value for sample in families(watch)["kvscope_engine_stopped"].samples] == [1]


@pytest.fixture
def no_gpu() -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield
    else:
        pynvml.nvmlShutdown()
        pytest.skip("there is a GPU here")


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_its_metrics_are_absent(watch: Pipeline) -> None:
    assert list(gpu_families([])) == []
    assert b"kvscope_gpu" not in page(watch)


def test_memory_of_a_worker_is_its_engines_and_the_rest_is_others() -> None:
    engine = here("lab@127.0.0.1:8000/0", os.getpid())
    assert engine is not None
    assert here("lab@elsewhere.example:8000/0", os.getpid()) is None
    assert here("lab@127.0.0.1:8000/0", 0) is None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        used = {os.getpid(): 3, worker.pid: 4, os.getppid(): 5, 1 << 30: 6}
        assert by_engine(used, {engine.pid: engine.engine}) == {engine.engine: 3 + 4, OTHER_PROCESSES: 5 + 6}
        worker.communicate(b"\n")


def test_with_a_gpu_the_drivers_figures_are_on_the_page(watch: Pipeline) -> None:
    found = {family.name: family for family in gpu_families([])}
    if not found:
        pytest.skip("there is no GPU here, or its driver does not answer")
    for _, sizes in by_device(found["kvscope_gpu_memory_bytes"]):
        assert sum(sizes) > 0
    for _, shares in by_device(found["kvscope_gpu_utilization_ratio"]):
        assert all(0 <= share <= 1 for share in shares)
    assert b"kvscope_gpu_memory_bytes" in page(watch)


def by_device(family: Metric) -> Iterator[tuple[str, list[float]]]:
    for uuid in sorted({sample.labels["uuid"] for sample in family.samples}):
        yield uuid, [sample.value for sample in family.samples if sample.labels["uuid"] == uuid]


def test_the_configuration_is_told(lab: Lab, watch: Pipeline) -> None:
    (info,) = families(watch)["kvscope_engine_info"].samples
    assert info.value == 1
    assert info.labels["num_gpu_blocks"] == str(lab.pool.total)
    assert info.labels["enable_prefix_caching"] == "True"


def test_faults_that_are_on_are_said(watch: Pipeline) -> None:
    on = {sample.labels["code"] for sample in families(watch)["kvscope_engine_fault_on"].samples}
    assert on == {fault.partition(":")[0] for fault in FAULTS}


def test_the_reference_names_every_metric_with_its_type_and_labels(watch: Pipeline) -> None:
    """The table that is generated, and what is really on a page with everything on it."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]*) \|", REFERENCE.read_text(), re.MULTILINE)
    documented = {name: (kind, labels) for name, kind, labels in rows}
    reported = [*families(watch).values(), *WatchCollector(watch, lambda: [SOURCE], lambda: ALERTS).collect()]
    for family in reported:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        kind, labels = documented[name]
        assert kind == family.type
        assert {label for sample in family.samples for label in sample.labels} <= {*labels.split(", "), "le"}
    assert {name.removesuffix("_total") for name in documented if name.startswith("kvscope_")} == {
        family.name for family in reported if family.name.startswith("kvscope_")
    }


def test_sources_are_told_with_their_lag_and_their_cost(watch: Pipeline) -> None:
    found = {family.name: family for family in WatchCollector(watch, lambda: [SOURCE]).collect()}
    assert by_labels(found["kvscope_source_lag_seconds"], "source") == {(SOURCE.target,): SOURCE.lag_s}
    assert by_labels(found["kvscope_source_cpu_seconds"], "source") == {(SOURCE.target,): SOURCE.cpu_s}
    assert by_labels(found["kvscope_source_batches_filled"], "supplier") == {
        (supplier,): count for supplier, count in SOURCE.filled_from.items()
    }
    assert any(sample.value > 0 for sample in found["process_cpu_seconds"].samples)


def test_alerts_are_told_by_receiver_and_absent_where_none_are_sent(watch: Pipeline) -> None:
    (receiver,) = ALERTS.receivers
    found = {family.name: family for family in WatchCollector(watch, alerts=lambda: ALERTS).collect()}
    assert by_labels(found["kvscope_alerts_deliveries"], "receiver", "outcome") == {
        (receiver.name, outcome): count for outcome, count in receiver.ended.items()
    }
    assert by_labels(found["kvscope_alerts_oldest_pending_seconds"], "receiver") == {
        (receiver.name,): receiver.oldest_pending_s
    }
    assert by_labels(found["kvscope_alerts_silences"]) == {(): ALERTS.silences}
    assert b"kvscope_alerts_" not in re.sub(rb"(?m)^#.*", b"", page(watch))


def test_what_leaks_grows_old_in_the_ages_and_never_gets_into_the_lifetimes(lab: Lab, watch: Pipeline) -> None:
    def reported(family: str, state: str | None = None) -> dict[str, float]:
        samples = [s for s in families(watch)[family].samples if s.labels.get("state") == state]
        return {sample.labels["le"]: sample.value for sample in samples if "le" in sample.labels}

    balance = by_labels(families(watch)["kvscope_blocks"], "holder")
    held = sum(balance[holder,] for holder in ("running", "waiting", "finished", "unaccounted"))
    leaked = balance["finished",] + balance["unaccounted",]
    before = reported("kvscope_block_age_seconds", "held")
    assert before["+Inf"] == held
    assert reported("kvscope_block_age_seconds", "cached_idle")["+Inf"] == balance["cached_idle",]
    lived = reported("kvscope_block_lifetime_seconds")["+Inf"]
    lab.clock.sleep(4_000)
    watch.feed([lab.heartbeat()])
    lab.step()
    watch.feed(lab.frames)
    after = reported("kvscope_block_age_seconds", "held")
    assert after["+Inf"] - after["3600.0"] >= leaked > 0
    assert before["3600.0"] == before["+Inf"]
    assert reported("kvscope_block_lifetime_seconds")["+Inf"] <= lived + balance["cached_idle",]
