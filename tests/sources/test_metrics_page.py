"""A metrics page to samples: names over versions, rates, restarts, gaps, and what is no page."""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Iterator

import pytest

from kvscope.lab.recorded_pages import BEGAN_S, At, Served, page, rows, served, whole_page
from kvscope.monitor.contract.samples import Fact, Sample
from kvscope.monitor.sources.metrics_page import BadPage, MetricsPage


@pytest.fixture
def server() -> Iterator[Served]:
    with served() as running:
        yield running


def read(server: Served, *pages: str, every_s: float = 1.0) -> list[Sample]:
    """The samples of these pages, scraped one after the other."""
    clock = At(BEGAN_S)
    reader = MetricsPage(server.url, clock=clock)
    samples = []
    try:
        for text in pages:
            server.answer = text
            samples += [record for record in reader.scrape() if isinstance(record, Sample)]
            clock.seconds += every_s
    finally:
        reader.close()
    return samples


def of_page(text: str, series: str) -> float:
    """A series' value by another hand than the reader's."""
    found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.M)
    assert found is not None, series
    return float(found[1])


LABELS = '{engine="0",model_name="tiny"}'


def test_a_real_page(server: Served) -> None:
    text = whole_page()
    (sample,) = read(server, text)
    assert sample.engine == f"tiny@127.0.0.1:{server.server_address[1]}/0"
    assert sample.running == of_page(text, f"vllm:num_requests_running{LABELS}")
    assert sample.waiting == of_page(text, f"vllm:num_requests_waiting{LABELS}")
    assert sample.usage == of_page(text, f"vllm:kv_cache_usage_perc{LABELS}") > 0
    assert sample.preemptions == of_page(text, f"vllm:num_preemptions_total{LABELS}") > 0
    assert sample.steps == of_page(text, f"vllm:iteration_tokens_total_count{LABELS}") > 0
    assert sample.generation_tokens == of_page(text, f"vllm:generation_tokens_total{LABELS}") > 0
    asked = of_page(text, f"vllm:prefix_cache_queries_total{LABELS}")
    assert sample.prefix_hit_rate == of_page(text, f"vllm:prefix_cache_hits_total{LABELS}") / asked > 0
    ends = re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", text, re.M)
    assert len(ends) > 1
    assert sample.finished == sum(map(float, ends)) > 0
    assert sample.deferred == 0
    assert sample.awake is True
    assert sample.prompt_tokens_per_s is None  # one page has no rates


def test_facts_come_once(server: Served) -> None:
    server.answer = text = whole_page()
    reader = MetricsPage(server.url)
    try:
        facts = {record.name: record.value for record in reader.scrape() if isinstance(record, Fact)}
        assert not any(isinstance(record, Fact) for record in reader.scrape())
    finally:
        reader.close()
    config = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    for name in ("num_gpu_blocks", "block_size", "kv_cache_memory_bytes"):
        reported = re.search(rf'[{{,]{name}="(\d+)"', config)
        assert reported is not None
        assert facts[name] == int(reported[1])
    assert "num_cpu_blocks" not in facts  # None in the page
    assert facts["exposition"] == "vllm"


def test_rates_come_from_counters(server: Served) -> None:
    begun, later = rows("decode-growth-preempts", 5.0)[2:4]
    first, second = read(server, page(begun), page(later), every_s=4.0)
    assert first.generation_tokens_per_s is None
    assert second.generation_tokens_per_s == (later["gen_tokens"] - begun["gen_tokens"]) / 4.0 > 0
    assert second.prompt_tokens_per_s == (later["prompt_tokens"] - begun["prompt_tokens"]) / 4.0 > 0
    assert not second.restarted


def test_a_counter_that_goes_back_is_a_restart(server: Served) -> None:
    """What it counts since is new, however little it is."""
    late = rows("decode-growth-preempts", 5.0)[-1]
    early = rows("decode-growth-preempts", 5.0)[1]
    assert late["gen_tokens"] > early["gen_tokens"] > 0
    _, after, then = read(server, page(late), page(early), page(early), every_s=2.0)
    assert after.restarted
    assert after.generation_tokens_per_s == early["gen_tokens"] / 2.0
    assert not then.restarted
    assert then.generation_tokens_per_s == 0


def old_page(minor: int) -> str:
    """The page as vLLM 0.`minor` would name things."""
    text = page(rows("never-freed")[30])
    without = ["num_requests_waiting_by_reason"]
    if minor < 12:
        text = text.replace("vllm:prefix_cache_", "vllm:gpu_prefix_cache_")
        usage = next(line for line in text.splitlines() if line.startswith("vllm:kv_cache_usage_perc"))
        text += usage.replace("kv_cache_usage_perc", "gpu_cache_usage_perc") + "\n"
    if minor < 9:
        without.append("kv_cache_usage_perc")
    return "\n".join(line for line in text.splitlines() if not any(name in line for name in without)) + "\n"


@pytest.mark.parametrize("minor", [8, 10, 18])
def test_names_over_versions(server: Served, minor: int) -> None:
    (old,), (new,) = read(server, old_page(minor)), read(server, page(rows("never-freed")[30]))
    assert old.usage == new.usage is not None
    assert old.prefix_hit_rate == new.prefix_hit_rate is not None
    assert (old.deferred, new.deferred) == (None, 0)


def test_what_is_not_exposed_is_not_0(server: Served) -> None:
    full = page(rows("never-freed")[30])
    some = "\n".join(line for line in full.splitlines() if "usage_perc" not in line and "running" not in line) + "\n"
    (sample,) = read(server, some)
    assert (sample.usage, sample.running) == (None, None)
    assert sample.waiting is not None
    (sample,) = read(server, re.sub(r"(kv_cache_usage_perc\{.*\}) \S+", r"\1 NaN", full))
    assert sample.usage is None


def test_sglang(server: Served) -> None:
    labels = '{model_name="llama",engine_type="unified",tp_rank="0"}'
    (sample,) = read(
        server,
        f"""\
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{{model_name="llama"}} 8.128902e+06
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{model_name="llama"}} 7.557572e+06
# TYPE sglang:token_usage gauge
sglang:token_usage{labels} 0.28
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate{labels} 0.0075
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{labels} 162.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{labels} 2826.0
""",
    )
    assert (sample.running, sample.waiting, sample.usage) == (162, 2826, 0.28)
    assert (sample.generation_tokens, sample.prefix_hit_rate) == (7557572, 0.0075)
    assert sample.steps is None
    assert sample.preemptions is None


def test_each_data_parallel_rank_is_an_engine(server: Served) -> None:
    text = page(rows("never-freed")[30])
    series = [line for line in text.splitlines() if not line.startswith("#") and 'engine="0"' in line]
    other = "\n".join(line.replace('engine="0"', 'engine="1"') for line in series)
    assert [sample.engine[-2:] for sample in read(server, text + other + "\n")] == ["/0", "/1"]


GARBAGE = ["<!doctype html><p>Not found", "\x00\x01\x02", '{"status": "ok"}', "vllm:num_requests_running{", "a b c\n"]


@pytest.mark.parametrize("text", GARBAGE)
def test_garbage_is_no_page(server: Served, text: str) -> None:
    with pytest.raises(BadPage, match="is not a metrics page"):
        read(server, text)


@pytest.mark.parametrize("text", ["", "python_info 1.0\n"])
def test_a_page_of_something_else(server: Served, text: str) -> None:
    with pytest.raises(BadPage, match=r"no metric of an engine.*--disable-log-stats.*--enable-metrics"):
        read(server, text)


def test_who_does_not_answer(server: Served) -> None:
    server.answer = 503
    reader = MetricsPage(server.url.replace("//", "//someone:secret@"), 0.2)
    with pytest.raises(BadPage, match="answers 503") as caught:
        reader.scrape()
    server.answer = 404
    with pytest.raises(BadPage, match=r"answers 404 Not Found: an engine's page is at http://HOST:PORT/metrics"):
        reader.scrape()
    reader.close()
    assert "secret" not in str(caught.value)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it connects, and that is all
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/metrics"
        reader = MetricsPage(url, 0.2)
        with pytest.raises(BadPage, match=r"did not answer within 0\.2 s"):
            reader.scrape()
        reader.close()
    reader = MetricsPage(url, 0.2)
    with pytest.raises(BadPage, match="does not answer"):
        reader.scrape()
    reader.close()


def test_a_scrape_that_fails_leaves_a_gap(server: Served) -> None:
    """Rates after it are over all of the time since the last that did not."""
    begun, later = rows("decode-growth-preempts", 5.0)[2:4]
    clock = At(BEGAN_S)
    reader = MetricsPage(server.url, clock=clock)
    try:
        server.answer = page(begun)
        reader.scrape()
        clock.seconds += 5
        server.answer = 500
        with pytest.raises(BadPage):
            reader.scrape()
        clock.seconds += 5
        server.answer = page(later)
        (sample,) = reader.scrape()
    finally:
        reader.close()
    assert isinstance(sample, Sample)
    assert sample.generation_tokens_per_s == (later["gen_tokens"] - begun["gen_tokens"]) / 10
    assert (reader.scrapes, reader.failed_scrapes) == (3, 1)


def test_a_damaged_page_is_read_or_refused(server: Served) -> None:
    """Nothing that a page can hold does anything else."""
    whole = page(rows("never-freed")[30])
    chance = random.Random(1)
    outcomes = set()
    reader = MetricsPage(server.url)
    try:
        for _ in range(150):
            text = list(whole)
            for _ in range(chance.randint(1, 3)):
                text[chance.randrange(len(text))] = chance.choice(["{", "}", '"', "\\", "\n", " ", "\0", "=", "é", "9"])
            server.answer = "".join(text[: chance.randint(1, len(text))])
            try:
                outcomes.add(bool(reader.scrape()))
            except BadPage:
                outcomes.add(False)
    finally:
        reader.close()
    assert outcomes == {True, False}
