"""stuck.outer-tier: the engine waits for an outer tier, or the tier takes nothing more."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted, duration
from ...ledger.engine_ledger import EngineLedger
from ..counted_events import counted_events
from ..detector import FromSamples, Settings
from ..judgement import Evidence, Judgement, TextJudgement
from ..sample_math import moved, seconds_apart
from ..shared_thresholds import LEAST_SCRAPES
from ..written.lost_blocks import HELD_LINES
from ..written.written_view import TextDetector, WrittenView, quotes
from .remote_load import RemoteLoad


class OuterTier(TextDetector):
    """An outer tier whose buffer is full.

    Sees: lines of allocations that failed in an outer tier, again and again.
    Likely when: a person reports requests that are stuck, unserved or slow.
    Cannot tell: the lines are all there is.
    """

    code = "stuck.outer-tier"
    severity = "error"
    title = "An outer tier is full, or too slow for the engine"

    def read(self, view: WrittenView) -> Iterator[TextJudgement]:
        """Allocations in an outer tier fail, again and again."""
        lines = view.lines("tier_allocation_failed")
        if len(lines) < HELD_LINES:
            return
        yield view.finding(
            self.code,
            lines[0],
            verdict="likely" if view.states("stuck", "waits_unserved", "slow") else "cannot-tell",
            evidence=(
                Evidence("failed_allocations", view.reported.count("tier_allocation_failed"), "lines", "log"),
                *quotes(lines),
            ),
            explanation=(
                f"The outer tier could not allocate {view.reported.count('tier_allocation_failed'):,} times: its buffer"
                " is full. What it cannot store is computed again later, and a fetch that needs room in it waits,"
                " whatever the engine's own pool has free."
            ),
            missing="what fills it: the tier's state line, or the stacks of the engine (py-spy dump)",
        )


class OuterTierFromCounter(FromSamples, OuterTier):
    """An outer tier without room, or one that holds requests up, by the engine's own counters.

    Sees: allocations in an outer tier that failed; or nothing that runs in most scrapes of a minute, while requests
    wait for loads, and loads that end.
    Likely when: always, since the counters do not show what pins the tier's memory, or what delays its loads.
    Not when: of a hundred requests fewer than one, or two altogether, failed: that is information.
    """

    recurs = True

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield what the engine counted."""
        yield from self._refuses(ledger, settings)
        yield from self._holds_up(ledger, settings)

    def _holds_up(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield loads for which the engine does nothing most of the time."""
        samples = ledger.samples
        if not samples[-1].tier_loaded_bytes:
            return  # nothing was loaded
        lasts_s = settings(RemoteLoad.least_wait_s)
        start = next(
            (n for n in range(len(samples) - 1, -1, -1) if seconds_apart(samples[n], samples[-1]) >= lasts_s), -1
        )
        window = samples[start:] if start >= 0 else []
        idle = [one for one in window if one.fetching and one.running == 0]
        if len(window) < settings(LEAST_SCRAPES) or 2 * len(idle) <= len(window):
            return
        first, last = window[0], window[-1]
        loaded = moved(first.tier_loaded_bytes, last.tier_loaded_bytes)
        if loaded <= 0:
            return
        fetching = idle[-1].fetching or 0
        yield self.finding(
            ledger,
            key="slow",
            severity="warning",
            since_ns=first.at_ns or 0,
            position=last.position,
            evidence=(
                Evidence("requests_fetching", fetching, "requests", last.source, idle[-1].position),
                Evidence("scrapes_with_nothing_running", len(idle), "scrapes", last.source, last.position),
                Evidence("scrapes", len(window), "scrapes", last.source, last.position),
                Evidence("loaded", loaded, "B", last.source, last.position),
            ),
            explanation=(
                f"In {len(idle):,} of the last {len(window):,} scrapes nothing ran, while"
                f" {counted(fetching, 'request')} waited for KV from the outer tier. It loaded {loaded:,} bytes in"
                f" these {duration(seconds_apart(first, last))}: loads end, and the engine waits for them."
            ),
            case="A slow tier",
            missing="how long the engine would compute the same prompts: their prefill time without the tier",
        )

    def _refuses(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        refused = counted_events(ledger.samples, "tier_refusals", settings)
        if refused is None:
            return
        yield self.finding(
            ledger,
            key="full",
            severity=refused.severity(settings) or "warning",
            since_ns=refused.since_ns(),
            position=refused.last.position,
            evidence=refused.evidence("allocations"),
            case="vLLM's offloading",
            explanation=(
                f"The engine counted {counted(refused.number, 'failed allocation')} in its outer tier"
                f" {refused.when()}{refused.of_requests()}: nothing in the tier could be evicted, because transfers in"
                " progress pin it or it is smaller than one step needs. What it refuses is not stored there, and is"
                " computed again once the pool has evicted it."
            ),
            missing="what pins the tier: how long its transfers take, and how large it is beside the KV that runs",
        )
