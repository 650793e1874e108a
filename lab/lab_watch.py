"""The monitor's side of an episode: what it finds in the recording, or in the metrics page alone."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvscope.monitor.contract.description import parse_description
from kvscope.monitor.contract.samples import Record
from kvscope.monitor.contract.wire import NO_REQUEST, Batch
from kvscope.monitor.detectors.findings import FindingReport, severity_at_least
from kvscope.monitor.detectors.judgement import Verdict
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.recording import Recording, record_ns

REPORT_EVERY_NS: Final = 2_000_000_000
SURENESS: Final[tuple[Verdict, ...]] = ("cannot-tell", "likely", "confirmed")


class FoundCode(msgspec.Struct):
    """A finding code of warning or above that fired: when first, in seconds of the episode, and what it claimed.

    verdict: the surest of all its findings, first reached at surest_s. first_verdict: the one that it had at at_s.
    named_as_effect: it fired only as the effect of another finding.
    """

    code: str
    at_s: float
    verdict: Verdict
    explanation: str
    requests: list[str] = []
    blocks: list[int] = []
    named_as_effect: bool = False
    first_verdict: Verdict | None = None
    surest_s: float = 0.0

    def __post_init__(self) -> None:
        """Take the first verdict as the surest."""
        self.first_verdict = self.first_verdict or self.verdict
        self.surest_s = self.surest_s or self.at_s


def unmarked_records(directory: Path) -> Iterator[Record]:
    """Yield a recording's records, without the faults that the engine's description names."""
    for record in Recording(directory).records():
        described = record.texts.get(NO_REQUEST) if isinstance(record, Batch) else None
        if isinstance(record, Batch) and described:
            unmarked = msgspec.structs.replace(parse_description(described), faults=[]).to_json()
            yield msgspec.structs.replace(record, texts={**record.texts, NO_REQUEST: unmarked})
        else:
            yield record


def find_in_recordings(directories: Iterable[Path]) -> list[FoundCode]:
    """Return what a monitor finds in the event streams of a server's ranks, each recorded in one of `directories`."""
    return find_in_records(heapq.merge(*map(unmarked_records, directories), key=record_ns))


def find_in_records(records: Iterable[Record], began_ns: int = 0) -> list[FoundCode]:
    """Return the findings of a monitor in records that are in order. `began_ns`: wall time of the episode's begin."""
    watch = Pipeline()
    found: dict[str, FoundCode] = {}
    due, last_ns = 0, began_ns
    for record in records:
        watch.feed([record])
        at_ns = record_ns(record)
        began_ns = began_ns or at_ns
        _note_transitions(watch, found, began_ns)
        if at_ns >= due:
            due = at_ns + REPORT_EVERY_NS
            _note_found_codes(watch, found, (at_ns - began_ns) / 1e9)
        last_ns = at_ns
    watch.settle()
    _note_transitions(watch, found, began_ns)
    _note_found_codes(watch, found, (last_ns - began_ns) / 1e9)
    return list(found.values())


def _note_transitions(watch: Pipeline, found: dict[str, FoundCode], began_ns: int) -> None:
    for finding, to, at_ns in watch.take_transitions():
        if to == "firing" and severity_at_least(finding.severity, "warning"):
            judged, at_s = finding.judgement, (at_ns - began_ns) / 1e9
            fired = found.setdefault(judged.code, FoundCode(judged.code, at_s, judged.verdict, judged.explanation))
            fired.named_as_effect = False
            _merge(fired, at_s, judged.verdict, judged.requests, judged.blocks)


def _note_found_codes(watch: Pipeline, found: dict[str, FoundCode], at_s: float) -> None:
    """Add who the firing findings name now, those that are no longer information, and the effects that they name
    instead of letting them fire.
    """
    for report in watch.findings("firing"):
        if report.code not in found and severity_at_least(report.severity, "warning"):  # it was information at first
            found[report.code] = FoundCode(report.code, at_s, report.verdict, report.explanation)
        if report.code in found:
            _merge(found[report.code], at_s, report.verdict, report.culprits.requests, report.culprits.blocks)
            _note_effects(report, found, at_s)


def _note_effects(report: FindingReport, found: dict[str, FoundCode], at_s: float) -> None:
    for effect in report.effects:
        named = found.setdefault(
            effect.code, FoundCode(effect.code, at_s, report.verdict, f"effect of {report.code}", named_as_effect=True)
        )
        _merge(named, at_s, named.verdict, effect.requests, ())


def _merge(found: FoundCode, at_s: float, verdict: Verdict, requests: Sequence[str], blocks: Sequence[int]) -> None:
    if SURENESS.index(verdict) > SURENESS.index(found.verdict):
        found.verdict, found.surest_s = verdict, at_s
    found.requests = list(dict.fromkeys((*found.requests, *requests)))[:200]
    found.blocks = list(dict.fromkeys((*found.blocks, *blocks)))[:200]
