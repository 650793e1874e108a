"""A text beside its statistics and facts: classes of lines, states in other forms, phrases, unknown lines.

These states are not in vLLM's statistics line:

form                 example
-------------------  --------------------------------------------------------------------------------------
SGLang's batch line  "Decode batch, #running-req: 4, token usage: 0.97, gen throughput (token/s): 429.3, #queue-req: 3"
a dump               "SchedulerStats(num_running_reqs=8, num_waiting_reqs=0, kv_cache_usage=0.0643)"
a list               "Running: 0 reqs, Waiting: 5-6 reqs, GPU KV cache usage: 0.0%", on one line or several
a metric             "vllm:kv_cache_usage_perc{engine="3"} -0.38", "sglang:num_queue_reqs was 0"
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from .exposition import FIELDS
from .log_lines import line_table
from .log_patterns import matched_lines
from .log_patterns.pattern import LineFields, MatchedLine
from .pasted_lines import PastedLine
from .pasted_pages import LABEL, PastedPages
from .report_phrases import stated_phrases

StateReading = dict[str, float]

_COUNT: Final = r"(\d{1,9})"
BATCH_LINE: Final = re.compile(r"\b(Prefill|Decode) batch\b")
_BATCH_FIELDS: Final = {
    "running": re.compile(rf"#running-req: {_COUNT}", re.ASCII),
    "waiting": re.compile(rf"#queue-req: {_COUNT}", re.ASCII),
    "usage": re.compile(r"(?<!swa )token usage: (\d(?:\.\d{1,4})?)", re.ASCII),
    "generation_tokens_per_s": re.compile(r"gen throughput \(token/s\): (\d{1,9}(?:\.\d{1,4})?)", re.ASCII),
}
_NEW_SEQUENCES: Final = re.compile(rf"#new-seq: {_COUNT}", re.ASCII)

_LIST_FIELDS: Final = {
    "running": re.compile(rf"\bRunning(?: requests| reqs)?\W{{1,3}}{_COUNT}(?:-\d{{1,9}})?(?: reqs?)?\b", re.ASCII),
    "waiting": re.compile(
        rf"\b(?:Waiting|Pending)(?: requests| reqs)?\W{{1,3}}{_COUNT}(?:-\d{{1,9}})?(?: reqs?)?\b", re.ASCII
    ),
    "usage": re.compile(r"KV cache usage\W{1,3}(\d{1,3}(?:\.\d{1,3})?) ?%", re.ASCII),
    "generation_tokens_per_s": re.compile(
        r"(?:generation |gen |\b)throughput\W{1,3}(\d{1,9}(?:\.\d{1,3})?) ?tok", re.ASCII | re.IGNORECASE
    ),
}
_JUDGED_FIELDS: Final = ("running", "waiting", "usage", "prefix_queries", "prefix_hits", "preemptions")
KEPT_METRICS: Final = {name: field for name, field in FIELDS.items() if field in _JUDGED_FIELDS} | {
    "vllm:prefix_cache_queries": "prefix_queries",
    "vllm:prefix_cache_hits": "prefix_hits",
    "vllm:external_prefix_cache_queries_total": "external_queries",
    "vllm:external_prefix_cache_hits_total": "external_hits",
}
"""Metrics that a report is judged by, and what each is called here."""
METRIC: Final = re.compile(
    r"\b((?:vllm|sglang|lmcache):[a-z_]{3,80})[`*]?(?:\{([^{}]{0,600})\})?[`*]?"
    r" {0,6}(?:was|is|=|:|->|stays at|shows|at)? {0,6}(-?\d{1,18}(?:\.\d{1,20})?(?:e[+-]?\d{1,3})?)(?![\w:])",
    re.ASCII | re.IGNORECASE,
)
_SCHEDULER_STATS: Final = {
    "running": re.compile(rf"\bnum_running_reqs={_COUNT}", re.ASCII),
    "waiting": re.compile(rf"\bnum_waiting_reqs={_COUNT}", re.ASCII),
    "usage": re.compile(r"\bkv_cache_usage=([01](?:\.\d{1,20})?(?:e-\d{1,2})?)", re.ASCII),
}


class MetricReading(NamedTuple):
    """One series of a pasted metrics page: its name, labels and value."""

    metric: str
    labels: dict[str, str]
    value: float


def batch_state(text: str) -> StateReading | None:
    """Return the state in a batch line of SGLang. `usage` is a share of the pool, 0 to 1. None if it is no such
    line.
    """
    kind = BATCH_LINE.search(text)
    if kind is None:
        return None
    state = _read(_BATCH_FIELDS, text[kind.start() :])
    if "running" not in state:
        return None
    if (new := _NEW_SEQUENCES.search(text)) is not None:
        state["running"] += int(new[1])
    return state


def listed_state(text: str) -> StateReading:
    """Return the engine's state in a line of prose, empty if none. `usage` is a share of the pool."""
    state = _read(_LIST_FIELDS, text)
    if "usage" in state:
        state["usage"] = round(state["usage"] / 100, 5)
    return state


def metric_readings(text: str) -> Iterator[MetricReading]:
    """Yield the series in a line, as a metrics page prints them or as a sentence names them."""
    if "vllm:" in text or "sglang:" in text or "lmcache:" in text:
        for name, labels, value in METRIC.findall(text):
            yield MetricReading(name, dict(LABEL.findall(labels)), float(value))


def _read(expressions: dict[str, re.Pattern[str]], text: str) -> StateReading:
    found = ((name, expression.search(text)) for name, expression in expressions.items())
    return {name: float(match[1]) for name, match in found if match is not None}


MOST_REPORT_LINES: Final = 5_000
"""A longer text is a log: what looks like prose in it is some program's output."""
LINES_OF_A_LIST: Final = 5
"""A list of an engine's state on several lines is no longer."""
WORDS_BEFORE: Final = 2
"""A bullet, a number or a name may stand before a pasted line. A sentence has more words."""
LOG_HEAD: Final = re.compile(
    r"\b(?:INFO|WARNING|ERROR|DEBUG)\b.{0,40}\d\d:\d\d|(?:Error|Exception|Warning)(?:: |\([\"'])"
    r"|\[TensorRT-LLM\]\[\w{1,10}\]|\bERROR \w{1,40}\{"
)
"""The text before an engine's message: its logger's head, or the exception's name."""
PHRASE_PREFIX: Final = "said:"
"""The prefix of the names of phrases."""
METRIC_READ: Final = "metric_read"
ABOUT_MEMORY: Final = re.compile(
    r"\bKV\b|kv[_-]?cache(?!\w*\.py:)|\bblocks?\b|\bout of memory\b|\bpreempt|\bevict", re.IGNORECASE
)
"""Lines that speak of KV memory, by more than the name of the file that logs them."""


class TextEvent(NamedTuple):
    """An event of one line. `line` counts from 1."""

    line: int
    name: str
    fields: LineFields
    quote: str
    is_stated: bool = False


class DescribedState(NamedTuple):
    """An engine's state at one moment, as a line or a list of the text gives it."""

    line: int
    figures: StateReading
    dialect: str
    at_ns: int | None = None


class TextEvents:
    """Pass it the lines of one text that are no statistics, and ask for the phrases at the end."""

    def __init__(self) -> None:
        self.unknown_lines: list[int] = []
        """Lines that mention KV memory and are of no known class, the first of them."""
        self.unknown_count = 0
        self._prose: list[PastedLine] = []
        self._lines = 0
        self._first_line = 0
        self._told: list[DescribedState] = []
        self._listed_until = 0
        self._listed: StateReading = {}
        self._listed_at = 0
        self.pages = PastedPages()
        self.engine_kinds: dict[str, int] = {}
        """The kinds of engines whose own lines were read, with the first of these."""
        self._metrics: StateReading = {}
        self._metrics_at = 0

    def passes(self, number: int) -> None:
        """Take note of a line in which nothing is looked for."""
        self._lines = number
        self._first_line = self._first_line or number

    def events(self, line: PastedLine, text: str, joined: str, spaced: str, is_known: bool) -> list[TextEvent]:
        """Return the known classes of the line. `text` is its message, without a logger's JSON. `is_known`: it
        contained a fact.
        """
        self.passes(line.number)
        found = []
        for match in matched_lines(text, joined, spaced):
            is_stated = self._is_stated(line, text, match)
            found.append(TextEvent(line.number, match.name, match.fields, match.quote, is_stated))
            if not is_stated:
                self.engine_kinds.setdefault(match.engine, line.number)
        readings = [reading for reading in metric_readings(text) if reading.metric in KEPT_METRICS]
        found += [TextEvent(line.number, METRIC_READ, _metric_fields(reading), reading.metric) for reading in readings]
        if line.number <= MOST_REPORT_LINES and not line.is_record:
            self._prose.append(line)
        elif line.is_record and not (found or is_known) and ABOUT_MEMORY.search(text) and not line_table().reason(text):
            self.unknown_count += 1
            if len(self.unknown_lines) < 10:
                self.unknown_lines.append(line.number)
        return found

    def states(self, line: PastedLine, text: str, joined: str, at_ns: int | None) -> Iterator[DescribedState]:
        """States that this line gives."""
        self.pages.line(line.number, text, at_ns)
        if "batch" in text and (state := batch_state(joined)) is not None:
            yield DescribedState(line.number, state, "sglang", at_ns)
            return
        if "SchedulerStats(" in text and "running" in (dumped := _read(_SCHEDULER_STATS, joined)):
            yield DescribedState(line.number, dumped, "", at_ns)
            return
        listed = listed_state(joined if line.is_record else text)
        if "Swapped:" in text:
            return  # a line of V0's statistics that is cut short: who waits is in two numbers there
        if line.is_record and "running" in listed and len(listed) > 1:
            self._listed_until = line.last
            yield DescribedState(line.number, listed, "", at_ns)
        elif listed and line.number > self._listed_until:
            self._list(line.number, listed)
        for reading in metric_readings(text):
            field = KEPT_METRICS.get(reading.metric)
            if field in ("running", "waiting", "usage") and reading.value >= 0:
                self._metrics_at = self._metrics_at or line.number
                self._metrics[field] = max(reading.value, self._metrics.get(field, 0.0))

    def stated_states(self) -> Iterator[DescribedState]:
        """Yield the states in prose or on a pasted page, for a text without statistics."""
        self._take_list()
        yield from self._told
        if "running" in self._metrics and not len(self.pages):
            yield DescribedState(self._metrics_at, self._metrics, "")

    def phrases(self) -> list[TextEvent]:
        """Return a person's phrases in the text, if it is a report. The events are named SAID_PREFIX and the
        concept.
        """
        if self._lines > MOST_REPORT_LINES:
            return []
        return [
            TextEvent(phrase.line, PHRASE_PREFIX + phrase.concept, {}, phrase.quote)
            for phrase in stated_phrases(self._prose)
        ]

    def _list(self, number: int, listed: StateReading) -> None:
        """Take a line of a list that may go on."""
        if self._listed and (number - self._listed_at > LINES_OF_A_LIST or listed.keys() & self._listed.keys()):
            self._take_list()
        self._listed_at = self._listed_at if self._listed else number
        self._listed = self._listed | listed

    def _take_list(self) -> None:
        if "running" in self._listed and len(self._listed) > 1:
            self._told.append(DescribedState(self._listed_at, self._listed, ""))
        self._listed = {}

    def _is_stated(self, line: PastedLine, text: str, match: MatchedLine) -> bool:
        """Whether a sentence mentions it. A log's line may stand within one, with its level before it. A title that has
        the message's numbers is the message.
        """
        if line.is_record or LOG_HEAD.search(text[: match.start + len("Error: ")]) is not None:
            return False
        if len(text[: match.start].split()) > WORDS_BEFORE:
            return True
        return self._first_line == line.number and not match.fields.keys() - {"seconds"}


def _metric_fields(reading: MetricReading) -> LineFields:
    fields: LineFields = {"metric": reading.metric, "value": reading.value}
    return fields | {name: reading.labels[name] for name in ("engine", "pid") if name in reading.labels}
