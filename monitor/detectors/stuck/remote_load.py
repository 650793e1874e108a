"""stuck.remote-load: requests wait for a fetch of KV whose end is never reported, or reported and not processed."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted, duration, listed, percent
from ...contract.kinds import Status
from ...contract.samples import Sample
from ...ledger.engine_ledger import EngineLedger
from ...ledger.records import RequestState
from ..counted_events import EVENTS_WINDOW_S, counted_events, is_few
from ..detector import Causes, FromSamples, Settings, StreamDetector, Threshold
from ..engine_pace import MORE_TIME, OutsideWaitLimit, at_pace_s, may_be_slow, outside_wait_limit
from ..judgement import ENGINE_PAUSED, SLOW_TRANSFER, Evidence, Judgement, holds_what_it_needs, seen
from ..leak.deferred_blocks import connector_text
from ..sample_math import last_window, moved, seconds_apart
from ..shared_thresholds import LEAST_SCRAPES
from .head_of_line import HeadOfLine
from .waiting_requests import (
    TRANSFER_PROGRESS,
    blocks_of_requests,
    could_report_until_ns,
    fetch_waits,
    overdue_judgement,
    overdue_requests,
    requests_text,
    since_text,
    was_overtaken,
)


def _began_at(record: RequestState) -> int:
    """Where its fetch ended, if it has, or began, or its wait where that is not known."""
    if record.fetch_ended_ns:
        return record.fetch_ended_at
    return record.fetching_at if record.fetching_ns else record.since_at


def _unprocessed_since_ns(ledger: EngineLedger, record: RequestState) -> int:
    """Return since when the engine could have processed the end of the fetch: one that came while it slept, only once
    something woke it. That it was not woken before is stuck.lost-wakeup. An engine that freed the tier's blocks by then
    had noticed it.
    """
    beats, ended_ns = ledger.beats, record.fetch_ended_ns
    noticed = any(ended_ns <= tier.unpinned_ns <= beats.slept_until_ns for tier in ledger.state.tiers.values())
    while_asleep = beats.slept_since_ns <= ended_ns <= beats.slept_until_ns and not noticed
    return beats.slept_until_ns if while_asleep else ended_ns


def _waits_its_turn(ledger: EngineLedger, record: RequestState) -> bool:
    """Return whether its fetch has ended and the scheduler has not come to it: the head of the queue waits for those
    that run, and no later request was admitted.
    """
    running = ledger.living().running
    if not (record.fetch_ended_ns and running) or ledger.head() is None:
        return False
    return not was_overtaken(record, record.fetch_ended_ns, running)


class RemoteLoad(StreamDetector[Judgement]):
    """Requests that wait for a fetch of KV that does not end.

    Sees: requests that wait for KV from another engine or tier for longer than fetches of this engine take, or that the
    engine ended as failed while they did.
    Confirmed when: the connector reported the end of each fetch, and the running engine has not processed it.
    Likely when: no end was reported: a large transfer over a slow link takes as long. Or they failed, and the engine
    does not say why.
    Cannot tell: first fetches of an engine may simply be slow.
    Not when: the engine sleeps (stuck.lost-wakeup); the fetch has ended and the request waits for its turn.
    """

    code = "stuck.remote-load"
    severity = "error"
    title = "Requests wait for a KV fetch that does not complete"
    moves_kv = "fetch"

    grace_s = Threshold(30, "s", "the fetch of one request's KV takes milliseconds to seconds, behind others some more")
    least_wait_s = Threshold(
        60, "s", "a fetch takes seconds, and the prefill of a long prompt on the other side less than a minute"
    )
    alternatives = (SLOW_TRANSFER, ENGINE_PAUSED)
    causes = Causes[Judgement]().of(HeadOfLine, holds_what_it_needs)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the fetches that take too long."""
        under_way = [r for r in fetch_waits(ledger).under_way if not _waits_its_turn(ledger, r)]
        yield from self._from_stream(ledger, settings, under_way)
        yield from self._failed_requests(ledger, settings)

    def _failed_requests(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield requests whose clients got an error instead of an answer, since their KV did not come."""
        if not ledger.state.totals.finished.get(Status.FINISHED_ERROR):
            return
        recent = [r for r in ledger.ended if ledger.age_s(r.finished_ns) < settings(EVENTS_WINDOW_S)]
        failed = [r for r in recent if r.status == Status.FINISHED_ERROR and r.fetching_ns]
        if not failed:
            return
        few = is_few(len(failed), len(recent), settings)
        position = ledger.at(failed[-1].fetching_at)
        yield self.finding(
            ledger,
            key="failed",
            severity="info" if few else None,
            since_ns=ledger.wall(failed[0].finished_ns),
            position=position,
            requests=tuple(record.id for record in failed),
            evidence=(
                seen("failed_requests", len(failed), "requests", position),
                seen("requests_ended", len(recent), "requests", position),
            ),
            explanation=(
                f"Of {counted(len(recent), 'request')} that ended in the last {duration(settings(EVENTS_WINDOW_S))},"
                f" {len(failed):,} failed while {connector_text(ledger)} fetched their KV: the clients got an error."
                " The other side may have exited, dropped the requests, or have a different model, layout or release."
            ),
            case="Failed transfers",
            missing="why each failed: the log at that time",
        )

    def _limits(
        self, ledger: EngineLedger, settings: Settings, fetching: list[RequestState]
    ) -> dict[int, OutsideWaitLimit]:
        """Return how long each fetch may take, by the number of its request."""
        history = ledger.outside_waits.fetches
        return {
            r.number: OutsideWaitLimit(_unprocessed_since_ns(ledger, r), at_pace_s(ledger, settings, self.grace_s))
            if r.fetch_ended_ns
            else outside_wait_limit(
                ledger, settings, history, self.grace_s, r.fetching_ns or r.since_ns, max(len(r.blocks), 1)
            )
            for r in fetching
        }

    def _from_stream(
        self, ledger: EngineLedger, settings: Settings, fetching: list[RequestState]
    ) -> Iterator[Judgement]:
        limits = self._limits(ledger, settings, fetching)
        late = overdue_requests(
            ledger,
            fetching,
            lambda r: limits[r.number].still_since_ns,
            could_report_until_ns(ledger),
            lambda r: limits[r.number].allowed_s,
        )
        if late is None:
            return
        state, at, count = ledger.state, ledger.at, len(late.records)
        blocks = blocks_of_requests(late.records)
        share = len(blocks) / (state.total - state.reserved)
        until_ns = could_report_until_ns(ledger)
        waits = [limits[record.number] for record in late.records]
        is_first = may_be_slow([((until_ns - limit.still_since_ns) / 1e9, limit) for limit in waits])
        ended = [record for record in late.records if record.fetch_ended_ns]
        what = _reported_text(ledger, ended, count)
        yield overdue_judgement(
            self,
            ledger,
            late,
            began_at=_began_at(late.records[0]),
            unseen="" if len(ended) == count else MORE_TIME if is_first else TRANSFER_PROGRESS,
            is_unproven=is_first,
            severity="info" if is_first else None,
            blocks=tuple(blocks),
            evidence=(
                seen("requests_waiting", count, "requests", at(*map(_began_at, late.records))),
                seen("oldest_fetch_s", round(late.age_s, 1), "s", at(_began_at(late.records[0]))),
                seen("blocks_held", len(blocks), "blocks", at(*map(_began_at, late.records))),
                seen("share_of_pool", round(share, 4), "of the pool", at(*map(_began_at, late.records))),
                seen(
                    "fetches_reported_complete",
                    len(ended),
                    "requests",
                    at(*map(_began_at, late.records), *(record.fetch_ended_at for record in ended)),
                ),
                seen(
                    "connector_polls",
                    state.heartbeat.connector_polls if state.heartbeat else "not heard",
                    "polls",
                    at(state.places.heartbeat),
                ),
            ),
            explanation=(
                f"{requests_text(late)} {'waits' if count == 1 else 'wait'} for KV from another engine or tier,"
                f" {since_text(ledger, late)} ({duration(late.age_s)}): {what}. {counted(len(blocks), 'block')}"
                f" ({percent(share)} of the pool) {'is' if len(blocks) == 1 else 'are'} reserved for it meanwhile."
            ),
        )


def _reported_text(ledger: EngineLedger, ended: list[RequestState], count: int) -> str:
    """Describe what the connector reported of `count` fetches, of which these have ended."""
    by = connector_text(ledger)
    if not ended:
        return f"{by} has reported neither success nor failure"
    if len(ended) == count:
        return f"{by} has reported completion, but the engine, which keeps running, has not processed it"
    return f"{by} has reported the end of {listed([record.id for record in ended])}, but not of the others"


def _fetched(sample: Sample) -> int:
    """Return how many requests wait for KV from elsewhere: those of which the engine says so, or all that wait for
    something other than room in an engine that looks for KV elsewhere.
    """
    return sample.fetching or (sample.deferred or 0 if sample.external_queries else 0)


class RemoteLoadFromCounters(FromSamples, RemoteLoad):
    """Fetches that fail, or of which none ends, by the engine's own counts.

    Sees: transfers that failed; or requests that wait for KV from elsewhere while nothing runs, ends or yields a token.
    Likely when: always, since the counts do not name the requests.
    Not when: of a hundred requests one or none lost its transfer, or two altogether: that is information.
    """

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield what the engine counted."""
        yield from self._failed(ledger, settings)
        yield from self._without_end(ledger, settings)

    def _failed(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        failed = counted_events(ledger.samples, "failed_transfers", settings)
        if failed is None:
            return
        yield self.finding(
            ledger,
            key="failed",
            severity=failed.severity(settings) or "warning",
            since_ns=failed.since_ns(),
            position=failed.last.position,
            evidence=failed.evidence("transfers"),
            explanation=(
                f"The engine counted {counted(failed.number, 'KV transfer')} that failed {failed.when()}"
                f"{failed.of_requests()}. Each such request is computed here, fails, or waits until a time-out or an"
                " abort. The other side may have exited, dropped the request, or have a different layout."
            ),
            case="Failed transfers",
            missing="which requests, and what became of them: the log at that time, or the event stream",
        )

    def _without_end(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield fetches of which none ended: where nothing runs, one that did would have yielded a token or ended."""
        samples = ledger.samples
        start = last_window(samples, lambda one: bool(_fetched(one)) and one.running == 0 and one.awake is not False)
        if start is None:
            return
        first, last = samples[start], samples[-1]
        waited_s, scrapes = seconds_apart(first, last), len(samples) - start
        if waited_s < settings(self.least_wait_s) or scrapes < settings(LEAST_SCRAPES):
            return
        if first.generation_tokens is None or first.finished is None:
            return  # whether one ended is not exposed
        counters = ("generation_tokens", "finished", "aborted")
        if any(moved(getattr(first, name), getattr(last, name)) for name in counters):
            return
        fetching = _fetched(first)
        yield self.finding(
            ledger,
            since_ns=first.at_ns or 0,
            position=first.position,
            evidence=(
                Evidence("requests_fetching", fetching, "requests", last.source, last.position),
                Evidence("waited", round(waited_s, 1), "s", last.source, last.position),
                Evidence("usage", round(100 * (last.usage or 0.0), 1), "%", last.source, last.position),
            ),
            explanation=(
                f"{counted(fetching, 'request')} {'has' if fetching == 1 else 'have'} waited for KV from another engine"
                f" or tier for {duration(waited_s)} or more: nothing runs, and no request ended or got a token"
                f" meanwhile. {percent(last.usage or 0.0)} of the pool is in use for it."
            ),
            missing="which requests, and whether the other side still sends: the event stream, or its log"
            + ("" if first.fetching else ". Requests that wait for a grammar look the same"),
        )
