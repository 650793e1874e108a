"""thrash.preemption: requests lose their blocks before these have given them a single token, again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from ...base.text import clock_time, counted, percent
from ...ledger.engine_ledger import EngineLedger
from ..advice import WHOLE_PROMPTS, metrics_dialect, whole_prompts_only
from ..detector import Causes, Settings, StreamDetector, Threshold
from ..judgement import ORDINARY_LOAD, Alternative, Judgement, hits_mostly_its_requests, seen
from ..preemptions import (
    COUNTED_NEED,
    LOST_EVENTS,
    FromPreemptionCounter,
    point_at,
    preempted_names,
    recent_preemptions,
)
from ..runbook_files import CaseOfAdvice
from ..sizing.kv_too_small import KvTooSmall


def _fit_at_full_length(ledger: EngineLedger, names: Sequence[str]) -> int:
    """How many such requests the pool holds at their ends, by the largest of them."""
    wanted = set(names)
    records = (*ledger.state.requests.values(), *ledger.ended)
    largest = max([record.blocks_to_finish for record in records if record.id in wanted], default=0)
    return max((ledger.state.total - ledger.state.reserved) // max(largest, 1), 1)


STILL_CACHED: Final = (
    "whether the prefix cache kept what they had computed: so far, little of it was computed again after them"
)


class PreemptionThrash(StreamDetector[Judgement]):
    """Preemptions of requests that had given no token yet.

    Sees: several requests that lost their blocks before a token of output, and a tenth of all computed tokens with
    them.
    Confirmed when: as much was computed again after them.
    Likely when: it was not: the prefix cache may have kept it. Or events were lost.
    Not when: the pool is merely full; a reset of the prefix cache preempted them.
    """

    code = "thrash.preemption"
    severity = "warning"
    title = "Requests are preempted repeatedly before they produce a token"
    counts_events = True
    sample_need = COUNTED_NEED

    window_s = Threshold(60, "s", "what was thrown away before is past")
    min_requests = Threshold(
        4, "requests", "a few lose their blocks so early as decodes grow while prompts are computed"
    )
    min_share = Threshold(
        0.1, "of the computed", "where a pool is merely full, a twentieth of the work or less is thrown away so early"
    )

    min_per_request = Threshold(
        1.5, "for each request", "where only the counter is known: most requests lose their blocks more than once"
    )
    alternatives = (ORDINARY_LOAD, Alternative("a reset of the prefix cache", "the reason of each preemption"))
    causes = Causes[Judgement]().of(KvTooSmall, hits_mostly_its_requests)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the preemptions whose work was thrown away."""
        if not ledger.preempted:
            return
        window_s = settings(self.window_s)
        recent = recent_preemptions(ledger, settings, window_s)
        without_output = [one for one in recent if one.computed and not one.outputs]
        hit = preempted_names(without_output)
        if len(hit) < settings(self.min_requests):
            return
        began, last_at = without_output[0].at_ns, ledger.at(without_output[-1].at)
        state = ledger.state
        wasted = sum(one.computed for one in without_output)
        first = point_at(ledger, ledger.now_ns - window_s * 1e9)
        computed = state.totals.computed_tokens - first.computed_tokens
        least = settings(self.min_share) * max(computed, 1)
        if wasted < least:
            return
        missing = _uncertain_waste(ledger, ledger.wall(began), least)
        yield self.finding(
            ledger,
            since_ns=ledger.wall(began),
            position=ledger.at(without_output[0].at),
            requests=hit,
            evidence=(
                seen("preemptions", len(recent), "preemptions", ledger.at(recent[-1].at)),
                seen("preemptions_without_output", len(without_output), "preemptions", last_at),
                seen("requests_preempted_without_output", len(hit), "requests", last_at),
                seen("tokens_wasted", wasted, "tokens", last_at),
                seen("tokens_computed", computed, "tokens", ledger.at(state.places.progressed)),
                seen(
                    "share_wasted",
                    round(wasted / max(computed, 1), 4),
                    "of the computed",
                    ledger.at(without_output[-1].at, state.places.progressed),
                ),
                seen(
                    "max_preemptions_per_request",
                    max(Counter(one.id for one in without_output).values()),
                    "preemptions",
                    last_at,
                ),
            ),
            explanation=(
                f"Since {clock_time(ledger.wall(began))}, {counted(len(hit), 'request')} lost their blocks"
                f" {counted(len(without_output), 'time')} before producing one output token: {counted(wasted, 'token')}"
                f" of computation {'may be' if missing == STILL_CACHED else 'were'} wasted,"
                f" {percent(min(wasted / max(computed, 1), 1))} of all computed tokens. The engine admits them when"
                " only a part of each prompt fits, and they then take blocks from each other."
            ),
            numbers={
                WHOLE_PROMPTS: whole_prompts_only(ledger),
                "the number of these": f"{_fit_at_full_length(ledger, hit)} (now {ledger.description.max_num_seqs}),"
                " the number of these",
            },
            missing=missing,
        )


def _uncertain_waste(ledger: EngineLedger, since_ns: int, least: float) -> str:
    """Return why it is not certain that so many tokens were wasted: those that the prefix cache kept are not computed
    again when their request is admitted again.
    """
    if ledger.state.damaged:
        return LOST_EVENTS
    return STILL_CACHED if ledger.tally.recompute.since(since_ns) < least else ""


class PreemptionThrashFromMetrics(FromPreemptionCounter, PreemptionThrash):
    """Preemptions by the engine's own counter, many for each request.

    Sees: a full pool and, in each third of three minutes, preemptions: more than one for each request that ran.
    Likely when: always, since the counter shows neither the requests nor what they had computed.
    Not when: they come in one burst, or a few for each request (sizing.kv-too-small).
    """

    counted_means = (
        "Requests are admitted, lose their blocks to each other and start over. A pool that is merely full preempts a"
        " few of them once."
    )
    unseen = "the requests and what they had computed"

    def advice_of_count(self, ledger: EngineLedger) -> CaseOfAdvice:
        """Return the advice with this engine's flag."""
        if metrics_dialect(ledger) == "sglang":
            return {"case": "SGLang"}
        return {"case": "From metrics", "numbers": {WHOLE_PROMPTS: whole_prompts_only(ledger)}}
