"""sizing.kv-too-small: fewer full-length requests fit than may run, and preemptions pay for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...base.text import clock_time, counted, percent
from ...ledger.engine_ledger import EngineLedger
from ...ledger.records import Preemption
from ..detector import Settings, StreamDetector, Threshold
from ..engine_pace import pace_s
from ..judgement import Alternative, Evidence, Judgement, seen
from ..preemptions import (
    COUNT_WINDOW_S,
    COUNTED_NEED,
    FULL_AT,
    LEAST_FILLED,
    LOST_EVENTS,
    MIN_COUNTED,
    FromPreemptionCounter,
    filled_share,
    point_at,
    preempted_names,
    preemption_passes,
    recent_preemptions,
)

EMPTY_BLOCKS: Final = "what asks for more blocks at once than were free: tokens filled only a part of the pool"


class KvTooSmall(StreamDetector[Judgement]):
    """A pool that holds fewer requests than may run.

    Sees: requests preempted for want of blocks, and the tokens that had to be computed again for it.
    Confirmed when: at each of these preemptions, tokens filled the pool.
    Likely when: they filled half of it or more.
    Not when: the pool holds all that may run at full length; blocks were free, or held without tokens to fill them, at
    these preemptions; the prefix cache gave what they had computed back.
    """

    code = "sizing.kv-too-small"
    severity = "warning"
    title = "The pool holds fewer requests than may run, so requests are preempted"
    counts_events = True
    settles_s = 120.0  # a pool does not become large enough in a minute in which preemptions cost less
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
    least_filled = LEAST_FILLED
    min_per_request = Threshold(
        0.3, "for each request", "where only the counter is known: at such a rate a tenth of the work is done again"
    )
    alternatives = (
        Alternative("a leak that fills the pool", "no finding about blocks that do not return"),
        Alternative("a few long requests", "the number of preemptions, and the recomputed work"),
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield what preemptions for want of blocks cost."""
        if not ledger.preempted:
            return
        state, described = ledger.state, ledger.description
        if not (described.max_model_len and described.max_num_seqs and state.block_size):
            return
        # At most as far back as the tokens computed are known.
        known_s = (ledger.now_ns - ledger.points[0].at_ns) / 1e9 if ledger.points else 0.0
        window_s = max(settings(self.window_s), min(pace_s(ledger, settings, self.window_steps), known_s))
        over_s = settings(self.over_s)
        recent = recent_preemptions(ledger, settings, window_s)
        longest = -(-described.max_model_len // state.block_size)
        # Several groups take blocks each, as many as its kind of layer needs: then only the engine knows how many.
        concurrency = state.usable / longest if len(described.groups) < 2 else None
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
        yield self.finding(
            ledger,
            pending=ledger.now_ns - began < over_s * 1e9,
            since_ns=began,
            position=ledger.at(recent[0].at),
            requests=preempted_names(recent),
            evidence=_pool_evidence(ledger, recent, concurrency, again, computed),
            explanation=(
                f"{_holds_text(ledger, concurrency)}, and up to {described.max_num_seqs} may run. Since"
                f" {clock_time(began)}, {counted(len(recent), 'preemption')} freed blocks for other requests, and"
                f" {counted(again, 'token')} had to be recomputed, {percent(min(again / max(computed, 1), 1))} of all"
                " computed tokens."
            ),
            change=_pool_change(ledger, concurrency),
            missing=_missing(ledger, recent, settings),
        )


def _missing(ledger: EngineLedger, recent: list[Preemption], settings: Settings) -> str:
    if ledger.state.damaged:
        return LOST_EVENTS
    is_filled = all(filled_share(ledger, one[0]) >= settings(FULL_AT) for one in preemption_passes(recent))
    return "" if is_filled else EMPTY_BLOCKS


def _holds_text(ledger: EngineLedger, concurrency: float | None) -> str:
    state, described = ledger.state, ledger.description
    if concurrency is None:
        return f"The pool has {counted(state.usable, 'block')} for {len(described.groups)} KV cache groups"
    tokens = counted(state.usable * state.block_size, "token")
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
        f"Lower --max-num-seqs to {max(1, int(concurrency))}, which fits at any request length, or to what your own"
        " lengths allow.",
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
            seen("full_length_concurrency", round(concurrency, 2), "requests", started_at),
            seen("full_length_blocks", _full_length_blocks(ledger), "blocks", started_at),
        )
    )
    return (
        *by_length,
        seen("max_num_seqs", described.max_num_seqs, "requests", started_at),
        seen("max_model_len", described.max_model_len, "tokens", started_at),
        seen("pool_blocks", usable, "blocks", started_at),
        seen("preemptions", len(recent), "preemptions", ledger.at(recent[-1].at)),
        seen("tokens_lost", sum(one.tokens_lost for one in recent), "tokens", ledger.at(recent[-1].at)),
        seen("tokens_recomputed", again, "tokens", ledger.at(state.places.moved)),
        seen("tokens_computed", computed, "tokens", ledger.at(state.places.progressed)),
    )


class KvTooSmallFromMetrics(FromPreemptionCounter, KvTooSmall):
    """Preemptions by the engine's own counter, some for each request.

    Sees: a full pool and, in each third of three minutes, preemptions: one for each few requests that ran.
    Likely when: always, since the counter shows neither what is computed again nor whether a leak fills the pool.
    Not when: they come in one burst.
    """

    counted_means = "The pool holds fewer requests than the engine admits, and it recomputes the preempted ones."
    unseen = "the recomputed tokens, and whether a leak fills the pool"
