"""The text of an engine's log, vLLM's from 0.10 to 0.33 and kvscope's own, to samples and facts.

Lines are searched, not matched from their start, so that prefixes of process managers, a report's prose around them
and several processes' lines mixed do no harm. Stamps have neither year nor zone: the year follows from when the log
ended, the zone is taken to be UTC, and `Log.notes` says so.

    fact                       from
    -------------------------  ------------------------------------------------------------------------------
    version                    "█  version 0.32.0", "vLLM API server version 0.10.2", "LLM engine (v0.32.0)"
    model, host, port, …       "non-default args: {…}": each argument under its own name
    kv_cache_size_tokens       "GPU KV cache size: 16,416 tokens"
    max_concurrency            "Maximum concurrency for 4,096 tokens per request: 4.01x"
    num_gpu_blocks_override    "Overriding num_gpu_blocks=8192 with num_gpu_blocks_override=513"
    available_kv_cache_gib     "Available KV cache memory: 45.94 GiB"
    blocks_not_freed           "Failed to reset prefix cache because some blocks (12) are not freed yet"
    kv_connector               "Creating v1 connector with name: NixlConnector"
    memory_…                   the memory bill: monitor/sources/memory_log.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from monitor.events.sample import Fact, Sample
from monitor.sources.memory_log import memory_facts

STATS: Final = re.compile(
    r"(?:Engine (?P<rank>\d+): |(?P<several>\d+) Engines Aggregated: )?"
    r"Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, Avg generation throughput: (?P<generation>[\d.]+) tokens/s, "
    r"Running: (?P<running>\d+) reqs, Waiting: (?P<waiting>\d+) reqs(?P<rest>.*)"
)
USAGE: Final = re.compile(r"KV cache usage: (-?[\d.]+)%")
HIT_RATE: Final = re.compile(r", Prefix cache hit rate: ([\d.]+)%")
STAMP: Final = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
FULL_STAMP: Final = re.compile(r"\b(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)")
ARGS: Final = re.compile(r"non-default args: \{(.*)")
ARG: Final = re.compile(r"'(\w+)': (?:\[?'([^']*)'\]?|(-?[\d.]+|True|False))(?=[,}])")

FACTS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("version", re.compile(r"(?:LLM engine \(v|vLLM API server version |█ +version )(\d+\.\d+\.\d+[\w.+]*)")),
    ("kv_cache_size_tokens", re.compile(r"KV cache size: ([\d,]+) tokens")),
    ("max_concurrency", re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")),
    ("num_gpu_blocks_override", re.compile(r"Overriding num_gpu_blocks=\d+ with num_gpu_blocks_override=(\d+)")),
    ("available_kv_cache_gib", re.compile(r"Available KV cache memory: ([\d.]+) GiB")),
    ("blocks_not_freed", re.compile(r"Failed to reset prefix cache because some blocks \((\d+)\) are not freed yet")),
    ("kv_connector", re.compile(r"Creating v1 connector with name: (\w+)")),
)


class Log:
    """Reads the lines of one log. `name` stands for its file in positions; `ended` is when it was last written to."""

    def __init__(self, name: str, ended: datetime) -> None:
        self.name = name
        self.ended = ended
        self.stats_lines = 0
        self.notes: list[str] = []
        self._args: dict[str, int | float | str] = {}
        self._last_stamp: int | None = None
        self._year = 0
        self._month = 0

    def records(self, lines: Iterable[str]) -> Iterator[Sample | Fact]:
        """Samples in the order of the lines, then facts. What is not understood is passed over."""
        facts: list[tuple[str, str, int | float | str, int | None]] = []
        last_position = ""
        stamped = False
        for number, line in enumerate(lines, 1):
            position = f"{self.name}:{number}"
            text = _message(line)
            at_ns = self._stamp(line)
            if at_ns is not None:
                stamped, last_position = True, position
                self._last_stamp = at_ns
            match = STATS.search(text)
            if match:
                self.stats_lines += 1
                yield self._sample(match, position, at_ns)
            elif (found := ARGS.search(text)) is not None:
                facts += [(position, name, value, at_ns) for name, value in self._arguments(found[1])]
            else:
                for name, pattern in FACTS:
                    if (found := pattern.search(text)) is not None:
                        facts.append((position, name, _value(found[1]), at_ns))
                facts += [(position, name, value, at_ns) for name, value in memory_facts(text)]
        if stamped and self._last_stamp is not None:
            facts.append((last_position, "last_stamp", "", self._last_stamp))
            self.notes.append("its times have no zone and are taken to be UTC")
        elif self.stats_lines:
            self.notes.append("its lines have no times; they are taken to be 10 s apart, as vLLM logs by default")
        # Only now is it known what the engine is called.
        for position, name, value, at_ns in facts:
            yield Fact(self.engine(), position, name, value, at_ns)

    def engine(self, rank: str = "000") -> str:
        """The engine's id, NAME@HOST:PORT/RANK as far as the log told it."""
        model = str(self._args.get("served_model_name") or self._args.get("model") or "engine")
        port = self._args.get("port")
        where = f"{self._args.get('host', '127.0.0.1')}:{port}" if isinstance(port, int) else self.name
        return f"{model}@{where}/{int(rank)}"

    def _sample(self, match: re.Match[str], position: str, at_ns: int | None) -> Sample:
        usage, hit_rate = USAGE.search(match["rest"]), HIT_RATE.search(match["rest"])
        if match["several"]:
            engine = f"{self.engine().rpartition('/')[0]}/all {match['several']}"
        else:
            engine = self.engine(match["rank"] or "000")
        return Sample(
            engine=engine,
            position=position,
            at_ns=at_ns,
            running=int(match["running"]),
            waiting=int(match["waiting"]),
            usage=float(usage[1]) / 100 if usage else None,
            prompt_tokens_per_s=float(match["prompt"]),
            generation_tokens_per_s=float(match["generation"]),
            prefix_hit_rate=float(hit_rate[1]) / 100 if hit_rate else None,
        )

    def _arguments(self, text: str) -> list[tuple[str, int | float | str]]:
        found = {name: quoted or _value(plain) for name, quoted, plain in ARG.findall(text)}
        self._args.update(found)
        return list(found.items())

    def _stamp(self, line: str) -> int | None:
        head = line if line.startswith("{") else line[:120]
        if (full := FULL_STAMP.search(head)) is not None:
            year, month, day, hour, minute, second = map(int, full.groups())
        elif (short := STAMP.search(head)) is not None:
            month, day, hour, minute, second = map(int, short.groups())
            year = self._year_of(month, day)
        else:
            return None
        try:
            moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
        except ValueError:
            return None
        return int(moment.timestamp()) * 1_000_000_000


    def _year_of(self, month: int, day: int) -> int:
        """The year of a stamp that has none. The first one's is the latest that is not after the log's end (by more
        than a day: zones differ); a step from one of the last months to one of the first is a new year's, and the step
        back, where several processes' lines are mixed, the old one's again.
        """
        if not self._year:
            limit = self.ended + timedelta(days=1)
            self._year = limit.year - ((month, day) > (limit.month, limit.day))
        else:
            self._year += (self._month - month > 6) - (month - self._month > 6)
        self._month = month
        return self._year


def _message(line: str) -> str:
    """The text of a line, also of one that is JSON."""
    if line.startswith("{"):
        try:
            fields = json.loads(line)
        except ValueError:
            return line
        for key in ("message", "msg", "event"):
            if isinstance(fields, dict) and isinstance(fields.get(key), str):
                return str(fields[key])
    return line


def _value(text: str) -> int | float | str:
    digits = text.replace(",", "")
    for number in (int, float):
        try:
            return number(digits)
        except ValueError:
            continue
    return text
