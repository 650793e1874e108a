"""sizing.kv-too-small: fewer full-length requests fit than may run, and preemptions pay for it."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.engine_pace import pace_s
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.preemption_counts import (
    COUNT_WINDOW_S,
    COUNTED_NEED,
    FULL_AT,
    MIN_COUNTED,
    CountedPreemptions,
    counted_preemptions,
)
from kvscope.monitor.detectors.preemptions import LOST_EVENTS, point_at, preempted_names, recent_preemptions
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import Preemption
from kvscope.monitor.text import clock_time, counted, percent


class KvTooSmall(Detector[Judgement]):
    """A pool that holds fewer requests than may run."""

    code = "sizing.kv-too-small"
    severity = "warning"
    title = "The pool holds fewer requests than may run, so requests are preempted"
    requires = ("stream", "metrics")
    position = 600
    sample_need = COUNTED_NEED

    window_s = Threshold(60, "s", "what it costs now counts")
    window_steps = Threshold(
        500, "steps", "an answer of 500 tokens takes as many: in slow steps, a shorter window has one request's life"
    )
    min_preemptions = Threshold(3, "preemptions", "one or two are long requests met by chance")
    min_share = Threshold(0.1, "of the computed", "the tax of 10 to 23 % that is reported of full pools begins here")
    over_s = Threshold(10, "s", "a size is no emergency, and what else preempts the requests is known by then")

    counted_window_s = COUNT_WINDOW_S
    min_counted = MIN_COUNTED
    full_at = FULL_AT
    min_per_request = Threshold(
        0.3, "for each request", "where only the counter is known: at such a rate a tenth of the work is done again"
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield what preemptions for want of blocks cost."""
        if ledger.has_stream and ledger.preempted:
            yield from self._from_stream(ledger, settings)
        elif not ledger.has_stream:
            counts = counted_preemptions(ledger, settings)
            if counts is not None and counts.per_request >= settings(self.min_per_request):
                yield _by_counters(ledger, counts)

    def _from_stream(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        state, described = ledger.state, ledger.description
        if not (described.max_model_len and described.max_num_seqs and state.block_size):
            return
        # At most as far back as the tokens computed are known.
        known_s = (ledger.now_ns - ledger.points[0].at_ns) / 1e9 if ledger.points else 0.0
        window_s = max(settings(self.window_s), min(pace_s(ledger, settings, self.window_steps), known_s))
        over_s = settings(self.over_s)
        recent = recent_preemptions(ledger, window_s)
        usable = state.total - state.reserved
        longest = -(-described.max_model_len // state.block_size)
        # Several groups take blocks each, as many as its kind of layer needs: then only the engine knows how many.
        concurrency = usable / longest if len(described.groups) < 2 else None
        enough = concurrency is not None and concurrency >= described.max_num_seqs
        if len(recent) < settings(self.min_preemptions) or enough:
            return
        since_ns = ledger.now_ns - window_s * 1e9
        again = ledger.tally.recompute.since(round(since_ns))
        lost = sum(one.tokens_lost for one in recent)
        computed = state.totals.computed_tokens - point_at(ledger, since_ns).computed_tokens
        if lost < settings(self.min_share) * max(computed, 1):
            return
        if again < settings(self.min_share) * lost:  # the prefix cache gives nearly all of it back, at no cost
            return
        began = ledger.wall(recent[0].at_ns)
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="likely" if state.damaged else "confirmed",
            pending=ledger.now_ns - began < over_s * 1e9,
            since_ns=began,
            position=ledger.at(recent[0].at),
            requests=preempted_names(recent),
            evidence=_pool_evidence(ledger, recent, concurrency, again, computed),
            explanation=(
                f"{_holds_text(ledger, concurrency)}, and up to {described.max_num_seqs} may run. Since"
                f" {clock_time(began)}, {counted(len(recent), 'preemption')} freed blocks for other requests, and"
                f" {counted(again, 'token')} had to be recomputed, {percent(min(again / max(computed, 1), 1))} of"
                " all computed tokens."
            ),
            do_now=("Send this engine fewer requests at once: requests that do not fit together are computed twice.",),
            change=_pool_change(ledger, concurrency),
            wont_help=("Restarting: the pool has its configured size, and none of it is lost.",),
            missing=LOST_EVENTS if state.damaged else "",
        )


def _by_counters(ledger: EngineLedger, counts: CountedPreemptions) -> Judgement:
    return Judgement(
        code=KvTooSmall.code,
        engine=ledger.engine,
        verdict="likely",
        since_ns=counts.first.at_ns or 0,
        position=counts.first.position,
        evidence=counts.evidence(),
        explanation=(
            f"{counts.text()} The pool holds fewer requests than the engine admits, and it recomputes the preempted"
            " ones."
        ),
        do_now=("Send this engine fewer requests at once: requests that do not fit together are computed twice.",),
        change=(
            "Lower --max-num-seqs to about the number of requests that ran while the counter did not move.",
            "Enlarge the pool: a higher --gpu-memory-utilization, --kv-cache-dtype fp8, or more devices.",
        ),
        wont_help=("Restarting: the pool has its configured size, and none of it is lost.",),
        missing="the recomputed tokens, and whether a leak fills the pool: attach the event stream (monitor doctor"
        " tcp://HOST:5757)",
    )


def _holds_text(ledger: EngineLedger, concurrency: float | None) -> str:
    state, described = ledger.state, ledger.description
    usable = state.total - state.reserved
    if concurrency is None:
        return f"The pool has {counted(usable, 'block')} for {len(described.groups)} KV cache groups"
    tokens = counted(usable * state.block_size, "token")
    return f"The pool holds {tokens}, {concurrency:.1f} requests of max_model_len {described.max_model_len:,}"


def _full_length_blocks(ledger: EngineLedger) -> int:
    described = ledger.description
    return -(-described.max_model_len // ledger.state.block_size) * described.max_num_seqs


def _pool_change(ledger: EngineLedger, concurrency: float | None) -> tuple[str, ...]:
    described = ledger.description
    wanted = _full_length_blocks(ledger)
    bytes_wanted = wanted * described.kv_bytes_per_block
    shorter = f"Lower --max-model-len from {described.max_model_len}, if no request needs that length."
    if concurrency is None:
        return (
            f"Lower --max-num-seqs from {described.max_num_seqs} to about the number that ran between preemptions.",
            "Enlarge the pool: a higher --gpu-memory-utilization, or --kv-cache-memory-bytes.",
            shorter,
        )
    return (
        f"Lower --max-num-seqs to {max(1, int(concurrency))}, which fits at any request length, or to what"
        " your own lengths allow.",
        "Enlarge the pool: a higher --gpu-memory-utilization"
        + (
            f", or --kv-cache-memory-bytes {bytes_wanted} ({wanted:,} blocks) for all of them at full length."
            if bytes_wanted
            else "."
        ),
        shorter,
    )


def _pool_evidence(
    ledger: EngineLedger, recent: list[Preemption], concurrency: float | None, again: int, computed: int
) -> tuple[Evidence, ...]:
    state, described = ledger.state, ledger.description
    usable, started_at = state.total - state.reserved, ledger.at(state.places.started)
    by_length = (
        ()
        if concurrency is None
        else (
            Evidence("full_length_concurrency", round(concurrency, 2), "requests", position=started_at),
            Evidence("full_length_blocks", _full_length_blocks(ledger), "blocks", position=started_at),
        )
    )
    return (
        *by_length,
        Evidence("max_num_seqs", described.max_num_seqs, "requests", position=started_at),
        Evidence("max_model_len", described.max_model_len, "tokens", position=started_at),
        Evidence("pool_blocks", usable, "blocks", position=started_at),
        Evidence("preemptions", len(recent), "preemptions", position=ledger.at(recent[-1].at)),
        Evidence("tokens_lost", sum(one.tokens_lost for one in recent), "tokens", position=ledger.at(recent[-1].at)),
        Evidence("tokens_recomputed", again, "tokens", position=ledger.at(state.places.moved)),
        Evidence("tokens_computed", computed, "tokens", position=ledger.at(state.places.progressed)),
    )
