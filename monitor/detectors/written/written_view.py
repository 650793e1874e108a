"""A view of one engine in the text of a log or a report, for the functions of this package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Final, Unpack

from ...contract.samples import ReportedEvent, Sample
from ...ledger.engine_ledger import EngineLedger
from ...sources.text_events import PHRASE_PREFIX
from ..detector import Detector, FromLog, Settings
from ..judgement import Evidence, Judgement, TextJudgement
from ..runbook_files import FindingFields, with_advice
from ..sample_math import DEFAULT_INTERVAL_S, apart_s

MOST_QUOTED_LINES: Final = 4
"""The most lines quoted of those that a verdict rests on."""
COMPLAINTS: Final = (
    "stuck",
    "waits_unserved",
    "not_freed",
    "unanswered",
    "slow",
    "out_of_memory",
    "start_fails",
    "wrong_output",
    "prefix_misses",
    "process_gone",
    "repeats",
    "preempted",
    "metric_wrong",
    "no_room_for_pool",
    "crashes",
    "asks_for_help",
)
"""Concepts that report a problem. The others only describe."""


class WrittenView:
    """The lines, phrases, samples and facts of an engine that a text is all there is of."""

    def __init__(self, ledger: EngineLedger, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.ledger = ledger
        self.engine = ledger.engine
        self.facts = ledger.facts
        self.reported = ledger.reported

    @cached_property
    def samples(self) -> Sequence[Sample]:
        """The figures of the text's lines."""
        return self.ledger.samples.of_log

    @cached_property
    def pages(self) -> Sequence[Sample]:
        """The figures of the metrics pages in the text."""
        return self.ledger.samples.pages_of_log

    def finding(
        self, code: str, began: ReportedEvent | Sample | None = None, **fields: Unpack[FindingFields]
    ) -> TextJudgement:
        """Return a judgement of a code about the engine, with its runbook's advice: likely, unless `fields` have
        another verdict. It begins at the line `began`.
        """
        if began is not None:
            fields |= {"since_ns": began.at_ns or 0, "position": began.position}
        fields.setdefault("verdict", "likely")
        return TextJudgement(code, self.engine, **with_advice(code, fields))

    def lines(self, *names: str) -> list[ReportedEvent]:
        """Return the engine's own lines of these classes."""
        return [event for event in self.reported.of(*names) if not event.is_stated]

    def states(self, *concepts: str) -> bool:
        """Whether prose names one of the concepts."""
        return any(PHRASE_PREFIX + concept in self.reported for concept in concepts)

    def phrases(self, *concepts: str) -> list[ReportedEvent]:
        """Return the phrases that name them."""
        return self.reported.of(*(PHRASE_PREFIX + concept for concept in concepts))

    def mentioned(self, *names: str) -> bool:
        """Whether lines of these classes are there, or a sentence mentions them."""
        return any(name in self.reported for name in names)

    def is_report(self) -> bool:
        """Return whether a person complains in their own words."""
        return self.states(*COMPLAINTS)

    def number(self, name: str) -> float | None:
        """Return a fact's number, or None if there is none."""
        fact = self.facts.get(name)
        return None if fact is None or isinstance(fact.value, str) else float(fact.value)


def line_number(position: str) -> int:
    """Return the line of a position NAME:LINE, or 0 for another position."""
    number = position.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def number_of(event: ReportedEvent, name: str) -> float | None:
    """Return a number of the line, or None if the line does not have it."""
    value = event.fields.get(name)
    return None if value is None or isinstance(value, str) else float(value)


def quotes(events: Sequence[ReportedEvent]) -> tuple[Evidence, ...]:
    """Return the lines themselves, the first and the last of many."""
    shown = [*events[: MOST_QUOTED_LINES - 1], events[-1]] if len(events) > MOST_QUOTED_LINES else events
    return tuple(
        Evidence(
            "quoted_text", event.quote, "", "report" if event.is_stated or _is_phrase(event) else "log", event.position
        )
        for event in shown
    )


def seconds_between(first: Sample, last: Sample, lines: int) -> float:
    """Return the time between two samples of a log, by vLLM's interval if they have no stamps."""
    apart = apart_s(first, last)
    return apart if apart is not None else (lines - 1) * DEFAULT_INTERVAL_S


def interval_of(samples: Sequence[Sample]) -> float:
    """Return the usual time between lines of statistics."""
    gaps = sorted(gap for one, two in pairwise(samples) if (gap := apart_s(one, two)))
    return gaps[len(gaps) // 2] if gaps else DEFAULT_INTERVAL_S


def _is_phrase(event: ReportedEvent) -> bool:
    return event.name.startswith(PHRASE_PREFIX)


class TextDetector(FromLog, Detector[Judgement]):
    """The base of codes that only the text of a log or a report shows: `read` yields them."""

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Read the text of an engine without an event stream."""
        yield from self.read(WrittenView(ledger, settings))

    def read(self, view: WrittenView) -> Iterator[TextJudgement]:
        """Yield what the text shows of this code."""
        raise NotImplementedError
