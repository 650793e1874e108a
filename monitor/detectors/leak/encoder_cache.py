"""leak.encoder-cache: the encoder's cache is full of what requests that wait have in it, so that none of them goes on.

The stream has no event for that cache. The sign is that the scheduler skips more than one for it and no request
advances at all, with KV free. A single one is stuck.encoder-budget, since an item of its own may be too large.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.leak.encoder_holders import hold_one_another
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import clock_time, counted, duration


class EncoderCache(Detector[Judgement]):
    """Requests that hold the encoder's cache against one another."""

    code = "leak.encoder-cache"
    severity = "error"
    title = "Waiting requests block each other in the encoder cache"
    requires = ("stream",)
    position = 170

    grace_s = Threshold(
        30, "s", "the encoder's work on a long video takes seconds, in which no other request may advance"
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the requests that hold the encoder's cache against one another."""
        if ledger.has_stream:
            yield from self._from_stream(ledger, settings)

    def _from_stream(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield requests that hold the encoder's cache against one another."""
        passed_over = hold_one_another(ledger)
        if not passed_over:
            return
        state, at = ledger.state, ledger.at
        last = max(passed_over, key=lambda record: record.since_ns)
        most = max(passed_over, key=lambda record: record.times_passed_over)
        since_ns = last.since_ns
        # Until when they could have advanced: a scheduler that makes no pass leaves no request out.
        age, grace = (ledger.looked_ns - since_ns) / 1e9, settings(self.grace_s)
        if age < grace / 2:
            return
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="likely",
            pending=age < grace
            or (ledger.looked_ns - state.lost_ns) / 1e9 < grace
            or not all(map(state.is_certain_request, passed_over)),
            since_ns=ledger.wall(since_ns),
            position=at(last.since_at),
            requests=tuple(record.id for record in passed_over),
            blocks=tuple(sorted(set().union(*(record.blocks for record in passed_over)))),
            evidence=(
                Evidence("requests_passed_over", len(passed_over), "requests", position=at(last.since_at)),
                Evidence(
                    "passed_over_running",
                    sum(record.is_running for record in passed_over),
                    "requests",
                    position=at(last.since_at),
                ),
                Evidence("no_progress_s", round(age, 1), "s", position=at(last.since_at)),
                Evidence(
                    "times_passed_over", most.times_passed_over, "times, at the least", position=at(most.passed_over_at)
                ),
                Evidence("blocks_free", state.free, "blocks", position=at(state.places.pool)),
            ),
            explanation=(
                f"{counted(len(passed_over), 'request')} are passed over for the encoder at every pass, and since"
                f" {clock_time(ledger.wall(since_ns))} ({duration(age)}) no request has advanced, with"
                f" {counted(state.free, 'block')} of KV free. These requests fill the encoder cache themselves: each"
                " waits for room that another of them holds."
            ),
            do_now=(
                f"Abort {passed_over[-1].id}, the last of them (close its connection). This frees its part of the"
                " encoder cache, and another request can advance. Repeat until all advance.",
            ),
            change=(
                "Give the encoder cache room for the items of all running requests (in vLLM it follows"
                " --max-num-batched-tokens), or run fewer requests at once (--max-num-seqs).",
                "Upgrade vLLM: older releases kept the encoder cache entries of preempted and waiting requests (PR"
                " #31857).",
            ),
            wont_help=(
                "A larger KV pool (gpu_memory_utilization): KV blocks are free. The encoder cache is separate memory.",
                "Waiting: each of these requests waits for another.",
            ),
            missing="what the encoder cache holds: the event stream does not have it, the engine's log may",
        )
