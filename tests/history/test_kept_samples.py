"""Engines known from metrics only: their past outlives the service, and that of a Prometheus server is shown."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvscope.monitor.base.errors import NotKnown
from kvscope.monitor.base.text import timestamp
from kvscope.monitor.contract.samples import Fact, Sample
from kvscope.monitor.history.history import History
from kvscope.monitor.history.retention import Keep, Keeper
from kvscope.monitor.history.sealed_segment import close
from kvscope.monitor.history.segment_files import directory_of, history_segments
from kvscope.monitor.history.segment_writer import Writer
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service.resumption import Resumption
from kvscope.monitor.service.source_reader import SourceReader
from kvscope.monitor.sources import prometheus_history
from kvscope.monitor.sources.prometheus_history import PrometheusHistory
from kvscope.monitor.sources.source import SourceOptions

PLAIN = "qwen@127.0.0.1:8000/0"
EVERY_NS = 5_000_000_000
HOURS_3 = 2_160
"""Samples of three hours."""
FACTS = {"model": "qwen", "num_gpu_blocks": 1_001, "block_size": 16}
BEGAN_NS = 0
"""Three hours before each test: an engine whose last sample is minutes old is not resumed."""


@pytest.fixture(autouse=True)
def _began(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = time.time_ns() // EVERY_NS * EVERY_NS
    monkeypatch.setattr(sys.modules[__name__], "BEGAN_NS", now_ns - (HOURS_3 + 2) * EVERY_NS)


def scraped(number: int) -> Sample:
    return Sample(
        PLAIN,
        f"scrape {number + 1}",
        BEGAN_NS + number * EVERY_NS,
        running=number % 5,
        waiting=number % 3,
        usage=number / HOURS_3,
        generation_tokens=100 * number,
        generation_tokens_per_s=20.0,
        steps=number,
        source="metrics",
    )


def stamp(number: int) -> str:
    return timestamp(BEGAN_NS + number * EVERY_NS) or ""


def kept_in(path: Path, *, until: int = HOURS_3) -> None:
    """Keep samples as a service does, half of them in a segment that is closed."""
    facts = [Fact(PLAIN, "scrape 1", name, value) for name, value in FACTS.items()]
    for part in (range(until // 2), range(until // 2, until)):
        keeper = Keeper(path, Keep())
        keeper.note([*facts, *map(scraped, part)])
        keeper.stop([])
        for segment in history_segments(directory_of(path, PLAIN)):
            if segment.path.suffix:
                close(segment.path, segment.path.parent)


def restarted(path: Path) -> Pipeline:
    """A service that begins again with what is kept."""
    watch = Pipeline(history=History(path))
    Resumption(watch).resume(History(path))
    return watch


def test_all_samples_of_before_a_restart_are_shown_beside_those_of_after_it(tmp_path: Path) -> None:
    kept_in(tmp_path)
    watch = restarted(tmp_path)
    watch.feed([scraped(HOURS_3), scraped(HOURS_3 + 1)])
    points = watch.points(PLAIN, seconds=4 * 3600, limit=10_000)
    assert [point.usage for point in points] == [number / HOURS_3 for number in range(HOURS_3 + 2)]
    assert {point.usable for point in points} == {1_000}
    (then,) = watch.engines(at=stamp(1_000))
    assert (then.usage, then.status, then.at) == (1_000 / HOURS_3, "serving", stamp(1_000))
    diff = watch.compare(PLAIN, since=stamp(2_000), until=stamp(2_120), other_since=stamp(100), other_until=stamp(220))
    assert {row.name: row.before for row in diff.metrics}["tokens generated"] == pytest.approx(20.0)
    assert f"{100 * 200 / HOURS_3:.1f}" in " ".join(watch.explain(PLAIN, stamp(100), stamp(200)).sentences)
    assert watch.history(PLAIN).first == stamp(0)
    assert watch.past_engines() == []


def test_a_past_that_is_not_kept_is_refused_and_not_made_up(tmp_path: Path) -> None:
    kept_in(tmp_path)
    watch = restarted(tmp_path)
    before = timestamp(BEGAN_NS - 10**9) or ""
    with pytest.raises(NotKnown):
        watch.engines(at=before)
    assert watch.points(PLAIN, until=before) == []
    assert len(Pipeline().past_engines()) == 0


def test_an_engine_that_is_gone_is_shown_as_it_was_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_in(tmp_path)
    later_ns = time.time_ns() + 3_600 * 10**9
    monkeypatch.setattr("kvscope.monitor.service.resumption.time.time_ns", lambda: later_ns)
    watch = restarted(tmp_path)
    assert watch.engines() == []
    (gone,) = watch.past_engines()
    assert (gone.status, gone.signal, gone.model, gone.at) == ("gone", "metrics", "qwen", stamp(HOURS_3 - 1))
    assert len(watch.points(PLAIN, seconds=4 * 3600, limit=10_000)) == HOURS_3
    assert watch.plan(PLAIN).blocks == 1_001


def test_each_segment_begins_with_the_facts_and_one_of_a_page_lasts_longer(tmp_path: Path) -> None:
    class Hours:
        """A clock on which half an hour passes between two scrapes."""

        now_ns = BEGAN_NS

        def time_ns(self) -> int:
            return self.now_ns

        monotonic_ns = time_ns

    clock, ended = Hours(), []
    writer = Writer(tmp_path / "e", ended.append, clock)  # type: ignore[arg-type]
    (tmp_path / "e").mkdir()
    writer.note([Fact(PLAIN, "", "model", "qwen"), Fact(PLAIN, "", "model", "qwen-2")])
    for number in range(6):
        writer.note([scraped(number)])
        clock.now_ns += 1_800 * 10**9
    writer.stop(None)
    assert len(ended) == 3
    history = History(tmp_path / "e")
    for segment in history_segments(tmp_path / "e"):
        names = [note.note() for note in history._open(segment).kept_notes() if note.letter == "F"]
        assert names[-1] == Fact(PLAIN, "", "model", "qwen-2")


class StoredSeries:
    """What a Prometheus server answers: samples of the last three hours, each 15 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = time.time_ns() // 10**6
        self.asked: list[int] = []
        monkeypatch.setattr(prometheus_history, "_ask", self.ask)

    def ask(self, _url: str, query: str, _timeout_s: float, _until_s: float) -> list[Any]:
        seconds = int(query.rpartition("[")[2].rstrip("s]"))
        self.asked.append(seconds)
        times = [self.now_ms - 15_000 * number for number in range(seconds // 15)][::-1]
        labels = {"instance": "vllm:8000", "model_name": "qwen", "engine": "0"}
        if query.startswith("process_cpu_seconds_total{"):
            cpu_s = [(ms / 1000, f"{(ms - times[0]) / 10**6}") for ms in times]
            return [prometheus_history._StoredSeries({"instance": labels["instance"]}, cpu_s)]
        return [
            prometheus_history._StoredSeries({"__name__": name} | labels, [(ms / 1000, str(value(ms))) for ms in times])
            for name, value in (
                ("vllm:num_requests_running", lambda ms: 0),
                ("vllm:num_requests_waiting", lambda ms: 0),
                ("vllm:kv_cache_usage_perc", lambda ms: 0.5),
                ("vllm:generation_tokens_total", lambda ms: ms // 1000),
            )
        ]


def read_once(watch: Pipeline, options: SourceOptions, keeper: Keeper | None = None) -> None:
    SourceReader(PrometheusHistory("http://127.0.0.1:9090", options), watch, keeper)._read_once()


def test_what_a_prometheus_server_stored_is_shown_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    server = StoredSeries(monkeypatch)
    watch = Pipeline()
    judged: list[int] = []
    judge = watch._judge
    monkeypatch.setattr(watch, "_judge", lambda ledger: (judged.append(ledger.now_ns), judge(ledger)))
    read_once(watch, SourceOptions(follow=True, look_back_s=7_200))
    assert server.asked == [7_200] * 3  # figures, histograms, and the CPU time of the servers
    (engine,) = watch.engines()
    assert len(watch.points(engine.engine, seconds=7_200)) == 480
    assert min(judged) > time.time_ns() - 605 * 10**9


def test_a_restarted_service_keeps_each_stored_sample_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = StoredSeries(monkeypatch)
    keeper = Keeper(tmp_path, Keep())
    first = Pipeline()
    read_once(first, SourceOptions(follow=True, look_back_s=3_600), keeper)
    keeper.stop([])
    server.now_ms += 60_000
    again = Pipeline(history=History(tmp_path))
    resumption = Resumption(again)
    resumption.resume(History(tmp_path))
    keeper = Keeper(tmp_path, Keep())
    options = SourceOptions(follow=True, look_back_s=3_600, kept_until_ns=resumption.kept_until_ns)
    read_once(again, options, keeper)
    keeper.stop([])
    (engine,) = again.engines()
    times = [point.at_ns for point in again.points(engine.engine, seconds=7_200, limit=1_000)]
    assert len(times) == len(set(times)) == 240 + 4
    assert times == sorted(times)
    stored = [note.at_ns for note in History(tmp_path).notes(engine.engine, 1, 1 << 62) if isinstance(note, Sample)]
    assert stored == times
    assert again.engines()[0].output_tokens_per_s == pytest.approx(1.0)
