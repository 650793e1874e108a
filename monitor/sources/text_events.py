"""Reads a text beside statistics and facts: classes of lines, states in other forms, phrases, unknown lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvscope.monitor.sources.described_states import (
    KEPT_METRICS,
    MetricReading,
    StateReading,
    batch_state,
    listed_state,
    metric_readings,
)
from kvscope.monitor.sources.log_patterns import matched_lines
from kvscope.monitor.sources.log_patterns.pattern import LineFields, MatchedLine
from kvscope.monitor.sources.pasted_lines import PastedLine
from kvscope.monitor.sources.report_phrases import stated_phrases

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
ABOUT_MEMORY: Final = re.compile(r"\bKV\b|kv[_-]?cache|\bblocks?\b|\bout of memory\b|\bpreempt|\bevict", re.IGNORECASE)


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
        self._metrics: StateReading = {}
        self._metrics_at = 0

    def events(self, line: PastedLine, text: str, joined: str, spaced: str, is_known: bool) -> list[TextEvent]:
        """Return the known classes of the line. `text` is its message, without a logger's JSON. `is_known`: it
        contained a fact.
        """
        self._lines = line.number
        self._first_line = self._first_line or line.number
        found = [
            TextEvent(line.number, match.name, match.fields, match.quote, self._is_stated(line, text, match))
            for match in matched_lines(text, joined, spaced)
        ]
        readings = [reading for reading in metric_readings(text) if reading.metric in KEPT_METRICS]
        found += [TextEvent(line.number, METRIC_READ, _metric_fields(reading), reading.metric) for reading in readings]
        if line.number <= MOST_REPORT_LINES and not line.is_record:
            self._prose.append(line)
        elif line.is_record and not (found or is_known) and ABOUT_MEMORY.search(text):
            self.unknown_count += 1
            if len(self.unknown_lines) < 10:
                self.unknown_lines.append(line.number)
        return found

    def states(self, line: PastedLine, text: str, joined: str, at_ns: int | None) -> Iterator[DescribedState]:
        """States that this line gives."""
        if "batch" in text and (state := batch_state(joined)) is not None:
            yield DescribedState(line.number, state, "sglang", at_ns)
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
        if "running" in self._metrics:
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
