"""Histograms of a metrics page and of a Prometheus server: which requests took how long between two scrapes."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator

import httpx2
import pytest

from kvscope.lab.recorded_pages import BEGAN_S, At, served, whole_page
from kvscope.monitor.contract.samples import Sample, decode_observed, encode_observed
from kvscope.monitor.ledger.request_latency import sample_latency
from kvscope.monitor.sources import prometheus_history
from kvscope.monitor.sources.exposition import MAX_BUCKETS, MAX_FIGURE, ExposedBuckets, durations_between, put_bucket
from kvscope.monitor.sources.metrics_page import MetricsPage
from kvscope.monitor.sources.prometheus_history import DURATIONS_S, PrometheusHistory
from kvscope.monitor.sources.source import SourceOptions
from tests.dashboards.programs import answers, free_port, program, running, until

FIRST_TOKEN = "vllm:time_to_first_token_seconds_bucket"
BUCKET = re.compile(r'^vllm:(time_to_first_token|request_queue_time)_seconds_bucket\{.*le="([^"]+)".*\} (\S+)$', re.M)
EVERY_S = 15
SCRAPES = 41


def page_with(first_tokens: list[float], queue_times: list[float]) -> str:
    """A real page whose two histograms have counted these durations since it was taken."""
    more = {"time_to_first_token": first_tokens, "request_queue_time": queue_times}

    def counted(found: re.Match[str]) -> str:
        count = float(found[3]) + sum(seconds <= float(found[2]) for seconds in more[found[1]])
        return found[0].removesuffix(found[3]) + str(count)

    return BUCKET.sub(counted, whole_page())


def samples_of(*pages: str) -> list[Sample]:
    clock = At(BEGAN_S)
    samples = []
    with served() as server:
        reader = MetricsPage(server.url, clock=clock)
        for text in pages:
            server.answer = text
            samples += [record for record in reader.scrape() if isinstance(record, Sample)]
            clock.seconds += EVERY_S
        reader.close()
    return samples


def test_a_real_page_counts_requests_between_its_scrapes() -> None:
    first, second, third = samples_of(page_with([], []), page_with([0.07, 0.3, 3000.0], [7.0]), page_with([], []))
    assert (first.first_token_s, first.queue_s) == (None, None)  # since when is not known
    assert second.first_token_s == ((0.06, 0.08, 1), (0.25, 0.5, 1), (2560.0, math.inf, 1))
    assert second.queue_s == ((5.0, 10.0, 1),)
    assert third.first_token_s is None  # counts that fall without a restart are of no histogram
    assert decode_observed(encode_observed(second)) == second


def test_a_restarted_engine_counts_from_0() -> None:
    early = re.sub(r"(vllm:generation_tokens_total\{.*\}) \S+", r"\1 1.0", page_with([], []))
    _, after = samples_of(page_with([9.0], []), early)
    assert after.restarted
    assert sum(count for _, _, count in after.first_token_s or ()) == 180


def test_a_page_without_the_histogram_does_not_expose_it() -> None:
    without = "\n".join(line for line in whole_page().splitlines() if "time_to_first_token" not in line) + "\n"
    _, second = samples_of(without, without)
    assert second.first_token_s is None
    assert second.queue_s == ()


@pytest.mark.parametrize(
    ("bound", "value"),
    [("0.1", -1.0), ("0.1", math.nan), ("0.1", 2 * MAX_FIGURE), ("nan", 1.0), ("-3", 1.0), ("a", 1.0), ("", 1.0)],
)
def test_a_bucket_that_no_histogram_has_is_left_out(bound: str, value: float) -> None:
    buckets: ExposedBuckets = {}
    put_bucket(buckets, FIRST_TOKEN, {"le": bound}, value)
    assert not any(buckets.values())
    put_bucket(buckets, FIRST_TOKEN, {"le": "0.1"}, 1.0)
    assert buckets == {"first_token_s": {0.1: 1.0}}


def test_tensor_parallel_ranks_repeat_and_other_labels_add_up() -> None:
    buckets: ExposedBuckets = {}
    for labels in ({"tp_rank": "0"}, {"tp_rank": "1"}, {"tp_rank": "0", "is_streaming": "True"}):
        put_bucket(buckets, "sglang:queue_time_seconds_bucket", {"le": "+Inf", **labels}, 5.0)
    assert buckets == {"queue_s": {math.inf: 10.0}}


def test_a_page_has_a_bounded_number_of_buckets() -> None:
    buckets: ExposedBuckets = {}
    for bound in range(10 * MAX_BUCKETS):
        put_bucket(buckets, FIRST_TOKEN, {"le": str(bound)}, 1.0)
    assert len(buckets["first_token_s"]) == MAX_BUCKETS


def test_two_histograms_with_other_bounds_are_not_compared() -> None:
    assert durations_between({0.1: 0.0, math.inf: 0.0}, {0.2: 1.0, math.inf: 1.0}) is None
    assert durations_between({0.1: 0.0}, {0.1: 1.0}) is None  # cut off
    assert durations_between({0.1: 0.0, math.inf: 0.0}, {0.1: 3.0, math.inf: 2.0}) is None  # no longer cumulative
    assert durations_between({0.1: 1.0, math.inf: 1.0}, {0.1: 1.0, math.inf: 1.0}) == ()


# -------------------------------------------------------------------- beside a real Prometheus


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """A server that has scraped a page whose requests became slower, and the time of the last scrape."""
    folder, server = tmp_path_factory.mktemp("durations"), program("prometheus", "prometheus")
    last_s = int(time.time()) - 60
    lines, first_tokens, queue_times = [], Counter[str](), Counter[str]()
    for scrape in range(SCRAPES):
        at_s = last_s - (SCRAPES - 1 - scrape) * EVERY_S
        lines.append(f'vllm:num_requests_running{{model_name="m",instance="a:8000"}} 1 {at_s}')
        lines.append(f'vllm:generation_tokens_total{{model_name="m",instance="a:8000"}} {scrape} {at_s}')
        for name, bound, _ in BUCKET.findall(whole_page()):
            counts = first_tokens if name == "time_to_first_token" else queue_times
            slow = 0.03 * 1.2**scrape
            counts[bound] += sum(share * slow <= float(bound) for share in (0.2, 0.5, 1.0, 1.0, 3.0))
            series = f'vllm:{name}_seconds_bucket{{model_name="m",instance="a:8000",le="{bound}"}}'
            lines.append(f"{series} {counts[bound]} {at_s}")
    (folder / "history.om").write_text("\n".join([*sorted(lines, key=_metric), "# EOF", ""]))
    (folder / "prometheus.yml").write_text("{}")
    own = f"127.0.0.1:{free_port()}"
    blocks = [program("promtool", "prometheus"), "tsdb", "create-blocks-from", "openmetrics"]
    with running([*blocks, folder / "history.om", folder / "data"], folder / "promtool.log") as process:
        assert process.wait(60) == 0, (folder / "promtool.log").read_text()
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with running([server, *options, f"--web.listen-address={own}"], folder / "prometheus.log") as process:
        until(lambda: answers(f"http://{own}/-/ready"), "Prometheus is ready", process)
        yield f"http://{own}", last_s


def _metric(line: str) -> str:
    return line.partition("{")[0]


@pytest.mark.smoke
@pytest.mark.parametrize("minutes", [2, 5, 10])
def test_percentiles_are_those_of_prometheus(prometheus: tuple[str, int], minutes: int) -> None:
    url, last_s = prometheus
    source = PrometheusHistory(url, SourceOptions(follow=True, look_back_s=7200.0, interval_s=0.01))
    samples = [record for record in source.poll() if isinstance(record, Sample)]
    assert len(samples) == SCRAPES
    since_ns = (last_s - 60 * minutes) * 10**9
    window = [sample for sample in samples if (sample.at_ns or 0) > since_ns]
    first_token, queue_time = sample_latency(window[1:])
    assert first_token is not None
    assert queue_time is not None
    theirs: dict[tuple[str, float], float] = {}
    for latency, name in ((first_token, "time_to_first_token"), (queue_time, "request_queue_time")):
        for share, ours in ((0.5, latency.p50_s), (0.95, latency.p95_s)):
            # Not with increase(), which extrapolates a bucket that was empty less than the others.
            bucket, offset_s = f"vllm:{name}_seconds_bucket", 60 * minutes - EVERY_S
            query = f"histogram_quantile({share}, {bucket} - {bucket} offset {offset_s}s)"
            theirs[name, share] = asked(url, query, last_s)
            # No percentile of the wait is above that of the first token, which comes after it.
            expected = min(theirs[name, share], theirs["time_to_first_token", share])
            assert ours == pytest.approx(expected, rel=1e-6)
    stored = source.stored(samples[0].engine, since_ns + 1, last_s * 10**9 + 1)
    assert sample_latency(stored[1:]) == (first_token, queue_time)


def asked(url: str, query: str, at_s: int) -> float:
    answer = httpx2.get(f"{url}/api/v1/query", params={"query": query, "time": at_s}, trust_env=False).json()
    (series,) = answer["data"]["result"]
    return float(series["value"][1])


def test_many_engines_come_with_the_histograms_of_a_shorter_time(
    prometheus: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_history, "MANY_STORED", 1)
    source = PrometheusHistory(prometheus[0], SourceOptions(follow=True, look_back_s=7200.0, interval_s=0.01))
    samples = [one for one in source.poll() if isinstance(one, Sample)]
    assert len(samples) == SCRAPES
    counted = [one for one in samples if one.first_token_s is not None]
    assert 0 < len(counted) <= DURATIONS_S / EVERY_S
    assert counted == samples[-len(counted) :]


def test_a_past_that_only_detectors_read_is_read_without_histograms(prometheus: tuple[str, int]) -> None:
    samples = [one for one in PrometheusHistory(prometheus[0], SourceOptions()).poll() if isinstance(one, Sample)]
    assert len(samples) == SCRAPES
    assert all(one.first_token_s is None and one.running == 1 for one in samples)
