"""Logs as vLLM wrote them from 0.8 to 0.33, whole, cut short, zipped, and files that are none."""

from __future__ import annotations

import gzip
import json
import os
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import pytest

from kvscope.monitor.base import limits
from kvscope.monitor.base.errors import BadTarget
from kvscope.monitor.contract.samples import Fact, Sample
from kvscope.monitor.sources.engine_log import Log
from kvscope.monitor.sources.log_file import MAX_LINE, MAX_PROSE, MOST_RECORDS, LogReading, LogTexts, lines_of, read_log
from kvscope.monitor.sources.pasted_lines import Stamps
from kvscope.monitor.sources.source import read_to_end
from kvscope.monitor.sources.targets import TargetKind, kind_of

DATA = Path(__file__).parent.parent / "data"
ENDED = datetime(2026, 11, 21, tzinfo=UTC)

TAIL = (
    "Avg prompt throughput: 600.0 tokens/s, Avg generation throughput: 77.2 tokens/s, Running: 5 reqs, Waiting: 2 reqs"
)
GPU = ", GPU KV cache usage: 11.7%"
HITS = ", Prefix cache hit rate: 99.2%"
API = "(APIServer pid=1) INFO 11-20 12:00:01 [loggers.py:{}] Engine 000: " + TAIL
OLD = (
    "Avg prompt throughput: 600.0 tokens/s, Avg generation throughput: 77.2 tokens/s, Running: 5 reqs, Swapped: 1 reqs,"
    " Pending: 1 reqs, GPU KV cache usage: 11.7%, CPU KV cache usage: 1.0%."
)
ITS_JSON = (
    f'{{"timestamp": "2026-11-20T12:00:01.5Z", "severity_text": "INFO", "body": "Engine 000: {TAIL}{GPU}{HITS}"}}'
)
WORDINGS = {
    "0.8.4": f"INFO 04-15 12:00:01 [loggers.py:87] Engine 000: {TAIL}{GPU}{HITS}",
    "0.8.4, the engine of before V1": f"INFO 04-15 12:00:01 [metrics.py:488] {OLD}",
    "0.9.2": f"INFO 07-01 12:00:01 [loggers.py:118] Engine 000: {TAIL}{GPU}{HITS}",
    "0.10.0": f"INFO 08-07 12:00:01 [loggers.py:122] Engine 000: {TAIL}{GPU}{HITS}",
    "0.10.2, its prefix cut off": f"[loggers.py:123] Engine 000: {TAIL}{GPU}{HITS}",
    "0.11.0": f"{API.format(127)}{GPU}{HITS}",
    "0.14.1": f"{API.format(257)}{GPU}{HITS}, External prefix cache hit rate: 3.0%, MM cache hit rate: 50.0%",
    "0.20.2": f"{API.format(271)}, Deferred: 1 reqs{GPU}{HITS}",
    "0.32.0": f"{API.format(335)}, Deferred: 1 reqs, KV fetch: 1 waiting to start, 0 in progress, 0 completed waiting"
    f", CPU KV cache usage: 11.7%{HITS}",
    "0.33.0, another device": f"{API.format(335)}, GPU + host KV cache usage: 11.7%{HITS}, Corrupted: 1 reqs",
    "0.31.0, nothing queried": f"{API.format(320)}{GPU}",
    "0.33.0, JSON": ITS_JSON,
    "0.33.0, JSON behind its process": f"(APIServer pid=1) {ITS_JSON}",
    "0.33.0, JSON in a container's JSON": json.dumps({"log": ITS_JSON + "\n", "time": "2026-11-20T12:00:02.1Z"}),
    "a logger's own JSON": f'{{"message": "Engine 000: {TAIL}{GPU}{HITS}", "timestamp": "2026-11-20T12:00:01"}}',
    "Docker's JSON": json.dumps({"log": f"{API.format(335)}{GPU}{HITS}\n", "time": "2026-11-20T12:00:01.5Z"}),
    "compose's name before it": f"vllm-1  | {API.format(335)}{GPU}{HITS}",
    "behind a progress bar": f"Processed prompts: 1%|  | 34/10000 [00:29<3:36:54]{API.format(335)}{GPU}{HITS}",
    "kubectl's time before it": f"2026-11-20T12:00:01.123Z stdout F {API.format(335)}{GPU}{HITS}",
    "in colours": f"\x1b[0;36m(APIServer pid=1)\x1b[0;0m INFO 11-20 12:00:01 Engine 000: {TAIL}{GPU}{HITS}",
}


def read(*lines: str) -> tuple[Log, list[Sample], dict[str, Fact]]:
    log = Log("a.log", ENDED)
    records = list(log.records(lines))
    facts = {record.name: record for record in records if isinstance(record, Fact)}
    return log, [record for record in records if isinstance(record, Sample)], facts


@pytest.mark.parametrize("version", WORDINGS)
def test_the_statistics_line_of_every_version(version: str) -> None:
    _, (sample,), _ = read("something else", WORDINGS[version])
    assert sample == Sample(
        engine="engine@a.log/0",
        position="a.log:2",
        at_ns=sample.at_ns,
        running=5,
        waiting=2,
        usage=pytest.approx(0.117),  # type: ignore[arg-type]
        prompt_tokens_per_s=600.0,
        generation_tokens_per_s=77.2,
        prefix_hit_rate=pytest.approx(0.992) if HITS in WORDINGS[version] else None,  # type: ignore[arg-type]
        deferred=1 if "Deferred: 1" in WORDINGS[version] else None,
    )
    if "cut off" in version:
        assert sample.at_ns is None
    else:
        assert sample.at_ns is not None
        assert datetime.fromtimestamp(sample.at_ns / 1e9, UTC).strftime("%H:%M") == "12:00"


def test_what_is_not_said_is_not_0() -> None:
    _, (sample,), _ = read(f"Engine 000: {TAIL}")
    assert (sample.usage, sample.prefix_hit_rate, sample.preemptions, sample.at_ns) == (None, None, None, None)
    _, (sample,), _ = read(f"Engine 000: {TAIL}, GPU KV cache usage: 3.0%")
    assert (sample.usage, sample.prefix_hit_rate) == (0.03, None)


def test_a_negative_usage_is_kept_as_it_is() -> None:
    _, (sample,), _ = read(f"Engine 000: {TAIL}, GPU KV cache usage: -0.5%")
    assert sample.usage == -0.005


def test_ranks_and_sums_of_several_engines() -> None:
    _, several, _ = read(f"Engine 000: {TAIL}", f"Engine 001: {TAIL}", f"4 Engines Aggregated: {TAIL}")
    assert [sample.engine for sample in several] == ["engine@a.log/0", "engine@a.log/1", "engine@a.log/all 4"]


def test_two_processes_lines_that_ran_into_each_other() -> None:
    _, both, _ = read(f"{API.format(335)}{GPU}{HITS}{API.format(335).replace('Engine 000', 'Engine 001')}{GPU}")
    assert [(sample.engine, sample.prefix_hit_rate) for sample in both] == [
        ("engine@a.log/0", pytest.approx(0.992)),
        ("engine@a.log/1", None),
    ]


def test_the_engine_of_before_v1_says_its_preemptions() -> None:
    warning = (
        "WARNING 04-15 12:00:05 [scheduler.py:1483] Sequence group 7 is preempted by PreemptionMode.RECOMPUTE mode"
        " because there is not enough KV cache space. total_num_cumulative_preemption={}"
    )
    _, samples, _ = read(OLD, warning.format(1), OLD, warning.format(51), OLD)
    assert [sample.preemptions for sample in samples] == [None, 1, 51]


@pytest.mark.parametrize("version", WORDINGS)
def test_a_line_cut_at_any_byte_says_less_but_nothing_false(version: str) -> None:
    line = WORDINGS[version]
    _, (whole,), _ = read(line)
    for end in range(len(line)):
        _, found, _ = read(line[:end])
        for sample in found:
            for name in ("running", "waiting", "usage", "prompt_tokens_per_s", "prefix_hit_rate"):
                assert getattr(sample, name) in (None, getattr(whole, name)), line[:end]


# -------------------------------------------------------------------- facts


def test_facts_of_a_real_log() -> None:
    log, records = read_log(DATA / "never-freed.log.gz")
    facts = {record.name: record.value for record in records if isinstance(record, Fact)}
    expected = {
        "version": "0.32.0",
        "served_model_name": "tiny",
        "port": 8100,
        "max_model_len": 4096,
        "block_size": 32,
        "num_gpu_blocks_override": 513,
        "kv_connector": "LeakyConnector",
    }
    assert {name: facts[name] for name in expected} == expected
    assert facts["kv_cache_size_tokens"] == 513 * 32
    assert log.engine() == "tiny@127.0.0.1:8100/0"
    assert {record.engine for record in records} == {log.engine()}


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("INFO 08-07 [api_server.py:1] vLLM API server version 0.10.2", "version", "0.10.2"),
        ("INFO [core.py:1] Initializing a V1 LLM engine (v0.10.1.1) with config: …", "version", "0.10.1.1"),
        ("  █▄█▀ █  version 0.33.0rc1", "version", "0.33.0rc1"),
        ("GPU KV cache size: 123,456 tokens", "kv_cache_size_tokens", 123456),
        ("size: 16,384 tokens, Maximum concurrency for 4,096 tokens per request: 4.00x", "max_concurrency", 4.0),
        ("Maximum concurrency for 262,144 tokens per request: 5.70x", "max_concurrency", 5.7),
        ("Available KV cache memory: 45.9 GiB", "available_kv_cache_gib", 45.9),
        ("Maximum concurrency for 262,144 tokens per request: 5.70x", "max_concurrency_tokens", 262144),
        ("CPU KV cache size: 16,384 tokens", "kv_cache_size_tokens", 16384),
        ("GPU + host KV cache size: 16,384 tokens", "kv_cache_size_tokens", 16384),
        ("INFO 04-12 [executor_base.py:112] # cuda blocks: 27443, # CPU blocks: 2048", "num_gpu_blocks", 27443),
        ("Failed to reset prefix cache because some blocks (12) are not freed yet", "blocks_not_freed", 12),
    ],
)
def test_facts_in_several_versions_words(line: str, name: str, value: object) -> None:
    _, _, facts = read(line)
    assert facts[name].value == value


def test_the_version_of_something_else_is_not_the_engines() -> None:
    _, _, facts = read("  █  version 0.32.0", "NCCL version 2.27.3+cuda12.9", "Python version 3.11.7")
    assert facts["version"].value == "0.32.0"


def test_what_a_rank_says_is_its_own_and_what_the_front_end_says_is_every_ranks() -> None:
    log = Log("a.log", ENDED)
    records = list(
        log.records(
            [
                "(APIServer pid=1) INFO non-default args: {'model': 'tiny', 'port': 8000, 'data_parallel_size': 2}",
                "(EngineCore_DP0 pid=2) INFO GPU KV cache size: 16,384 tokens",
                "\x1b[0;36m(EngineCore_DP1 pid=3)\x1b[0;0m INFO GPU KV cache size: 8,192 tokens",
                f"Engine 000: {TAIL}",
                f"Engine 001: {TAIL}",
            ]
        )
    )
    facts = {(fact.engine, fact.name): fact.value for fact in records if isinstance(fact, Fact)}
    for rank, tokens in ((0, 16384), (1, 8192)):
        engine = f"tiny@127.0.0.1:8000/{rank}"
        assert facts[engine, "kv_cache_size_tokens"] == tokens
        assert facts[engine, "data_parallel_size"] == 2


# -------------------------------------------------------------------- times


def when(line: str) -> datetime | None:
    at_ns = Stamps(ENDED).of(line, whole=line.startswith("{"))
    return None if at_ns is None else datetime.fromtimestamp(at_ns / 1e9, UTC)


@pytest.mark.parametrize(
    "line",
    [
        "INFO 11-20 12:00:01 [loggers.py:335] …",
        "2026-11-20 12:00:01,753 INFO …",
        "2026-11-20T12:00:01Z stdout F INFO 11-20 20:00:01 …",
        "2026-11-20T20:00:01.123+08:00 INFO …",
        "2026-11-20T06:30:01-0530 INFO …",
        '{"a": "' + "x" * 200 + '", "timestamp": "2026-11-20T12:00:01.5Z"}',
    ],
)
def test_a_zone_is_heeded_where_there_is_one(line: str) -> None:
    assert when(line) == datetime(2026, 11, 20, 12, 0, 1, tzinfo=UTC)


def test_what_is_no_time() -> None:
    assert when("INFO 13-45 99:00:01 …") is None
    assert when("0000-00-00 00:00:00 …") is None
    assert when("2026-11-20T12:00:01+99:99 …") is None
    assert when("x" * 200 + " 11-20 12:00:01") is None


def test_a_log_whose_times_have_zones_says_nothing_of_zones() -> None:
    log, _, _ = read(f"2026-11-20T12:00:01Z stdout F Engine 000: {TAIL}")
    assert log.notes == []
    log, _, _ = read(f"2026-11-20T12:00:01Z stdout F Engine 000: {TAIL}", f"INFO 11-20 12:00:01 Engine 000: {TAIL}")
    assert "UTC" in log.notes[0]


def stamps(ended: datetime, *months_days: str) -> list[str]:
    log = Log("a.log", ended)
    lines = [f"INFO {day} 12:00:00 [loggers.py:335] Engine 000: {TAIL}" for day in months_days]
    samples = [record for record in log.records(lines) if isinstance(record, Sample)]
    return [datetime.fromtimestamp((sample.at_ns or 0) / 1e9, UTC).strftime("%Y-%m-%d") for sample in samples]


def test_the_year_is_that_in_which_the_log_ended() -> None:
    assert stamps(ENDED, "06-01", "11-20") == ["2026-06-01", "2026-11-20"]
    assert stamps(ENDED, "11-22") == ["2026-11-22"]  # written east of here
    assert stamps(ENDED, "12-24") == ["2025-12-24"]  # it cannot have been written after its end


def test_over_new_year() -> None:
    ended = datetime(2027, 1, 2, tzinfo=UTC)
    days = ["12-30", "12-31", "01-01", "12-31", "01-02"]
    assert stamps(ended, *days) == ["2026-12-30", "2026-12-31", "2027-01-01", "2026-12-31", "2027-01-02"]
    assert stamps(datetime(2026, 12, 31, tzinfo=UTC), "12-31", "01-01") == ["2026-12-31", "2027-01-01"]


def test_a_29th_of_february_in_the_wrong_year_is_no_time() -> None:
    assert stamps(ENDED, "02-29", "03-01") == ["1970-01-01", "2026-03-01"]


# -------------------------------------------------------------------- files


def test_the_year_of_a_file_is_its_own(tmp_path: Path) -> None:
    path = tmp_path / "old.log"
    path.write_text(f"INFO 05-01 12:00:00 [loggers.py:335] Engine 000: {TAIL}\n")
    then = datetime(2024, 5, 2, tzinfo=UTC).timestamp()
    os.utime(path, (then, then))
    _, records = read_log(path)
    assert records[0].at_ns == int(datetime(2024, 5, 1, 12, tzinfo=UTC).timestamp()) * 10**9


def test_plain_and_zipped_are_the_same(tmp_path: Path) -> None:
    zipped = DATA / "never-freed.log.gz"
    plain = tmp_path / zipped.name
    plain.write_bytes(gzip.decompress(zipped.read_bytes()))
    seconds = zipped.stat().st_mtime
    os.utime(plain, (seconds, seconds))
    assert kind_of(str(plain)) == kind_of(str(zipped)) == TargetKind.LOG
    assert read_log(plain)[1] == read_log(zipped)[1]


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_of_a_damaged_zip_is_read_what_can_be(tmp_path: Path, damage: str) -> None:
    whole = DATA / "never-freed.log.gz"
    data = bytearray(whole.read_bytes())
    where = len(data) * 9 // 10
    if damage == "cut":
        del data[where:]
    else:
        data[where : where + 50] = b"\xff" * 50
    path = tmp_path / whole.name
    path.write_bytes(data)
    seconds = whole.stat().st_mtime
    os.utime(path, (seconds, seconds))
    log, records = read_log(path)
    assert "gzip" in log.notes[0]
    samples = [record for record in records if isinstance(record, Sample)]
    assert samples
    assert samples == [record for record in read_log(whole)[1] if isinstance(record, Sample)][: len(samples)]


@pytest.mark.parametrize("content", [b"\x1f\x8b", b"\x1f\x8b\x08\x00garbage", b"\x1f\x8bnot a gzip at all"])
def test_a_zip_of_which_nothing_can_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.log.gz"
    path.write_bytes(content)
    with pytest.raises(BadTarget, match=r"a\.log\.gz: cannot be read: it is a damaged gzip"):
        read_log(path)


def test_what_powershell_writes_is_the_same_log(tmp_path: Path) -> None:
    plain, wide = tmp_path / "plain" / "a.log", tmp_path / "wide" / "a.log"
    for path, encoding in ((plain, "utf-8"), (wide, "utf-16")):
        path.parent.mkdir()
        path.write_bytes(gzip.decompress((DATA / "lockstep-collapse.log.gz").read_bytes()).decode().encode(encoding))
    assert read_log(wide)[1] == read_log(plain)[1]


def test_a_line_without_end_is_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("█" * (2 * MAX_LINE) + f"\nEngine 000: {TAIL}\n" + '{"a":' * MAX_LINE)
    log, records = read_log(path)
    assert log.stats_lines == 1
    assert isinstance(records[0], Sample)
    assert max(map(len, lines_of(path, []))) == MAX_LINE


def test_what_is_beyond_the_longest_line_is_left_out_and_told(tmp_path: Path) -> None:
    """The cost of a line is that of its first million characters, however long it is; the lines after it count."""
    path = tmp_path / "a.log"
    path.write_text("a\n" + "b" * (20 * limits.LINE_CHARS) + f"\nEngine 000: {TAIL}\n" + "c" * (3 * limits.LINE_CHARS))
    notes: list[str] = []
    assert sum(map(len, lines_of(path, notes))) < 2.1 * limits.LINE_CHARS
    (note,) = notes
    assert note.startswith("line 2 has more than 1,048,576 characters")
    log, _ = read_log(path)
    assert log.stats_lines == 1
    assert note in log.notes


@pytest.mark.parametrize("content", [b"", b"\n\n\n", bytes(range(256)) * 40, b"\x00" * 4096, "Käse".encode("latin-1")])
def test_a_file_without_figures_says_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(content)
    assert kind_of(str(path)) is TargetKind.LOG
    log, records = read_log(path)
    assert (log.stats_lines, records) == (0, [])


def test_figures_amid_garbage_are_found(tmp_path: Path) -> None:
    path = tmp_path / "mixed"
    path.write_bytes(bytes(range(256)) + b"\n" + f"Engine 000: {TAIL}\n".encode() + b"\xff\xfe")
    log, records = read_log(path)
    assert log.stats_lines == 1
    assert len(log.notes) == 1
    assert isinstance(records[0], Sample)


def test_a_directory_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(BadTarget, match="cannot be read"):
        read_log(tmp_path)


def test_a_long_log_comes_in_parts_and_facts_with_what_follows_them(tmp_path: Path) -> None:
    lines = gzip.decompress((DATA / "never-freed.log.gz").read_bytes()).decode().splitlines(keepends=True)
    statistics = [line for line in lines if "Avg prompt" in line]
    path = tmp_path / "engine.log"
    path.write_text("".join(lines + statistics * (2 * MOST_RECORDS // len(statistics)) + lines))
    _, whole = read_log(path)
    source = LogTexts(str(path), lambda: [path])
    parts = list(read_to_end(source))
    assert len(parts) > 1
    assert list(chain.from_iterable(parts)) == whole
    assert [len(part) for part in parts[:-1]] == [MOST_RECORDS] * (len(parts) - 1)
    assert all(isinstance(record, Sample) for part in parts[:-1] for record in part)
    assert source.status().engines == tuple(dict.fromkeys(record.engine for record in whole))


def test_a_long_text_of_described_states_is_no_report_and_is_not_kept_back_whole(tmp_path: Path) -> None:
    batch = "[2026-05-24 03:50:10 TP0] Decode batch, #running-req: 4, #token: 9, token usage: 0.97, #queue-req: 3\n"
    path = tmp_path / "engine.log"
    path.write_text(batch * (MAX_PROSE + 100))
    reading = LogReading(path)
    records = reading.all_records()
    next(records)
    assert reading.log.described_states <= MAX_PROSE + 1
    assert sum(isinstance(record, Sample) for record in records) == MAX_PROSE + 100
