"""What a person's report supports when there is no engine, no log and no page: a hypothesis, never above cannot-tell.

collapse.lockstep needs a fall of usage that is told, the pool's size and the load's command.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from kvscope.monitor.analysis.demand import Demand, capacity_tokens, demands, number, tokens_per_request
from kvscope.monitor.detectors.collapse.lockstep import LOCKSTEP
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.events.samples import Fact
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import percent

SOURCE = "report"


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """What may be behind what is told of one engine."""
    if not ledger.has_stream and not ledger.samples and "usage_fell_from" in ledger.facts:
        yield from _lockstep_told(ledger, settings)


def _lockstep_told(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    facts = ledger.facts
    high, low = number(facts, "usage_fell_from") or 0.0, number(facts, "usage_fell_to") or 0.0
    asked, capacity, each = demands(facts), capacity_tokens(facts), tokens_per_request(facts)
    if not asked or capacity is None or each is None or high - low < settings(LOCKSTEP, "min_share"):
        return
    position = facts["usage_fell_from"].position
    yield Judgement(
        code=LOCKSTEP,
        engine=ledger.engine,
        verdict="cannot-tell",
        position=position,
        evidence=(
            Evidence("usage_told_before", round(100 * high, 1), "%", SOURCE, position),
            Evidence("usage_told_after", round(100 * low, 1), "%", SOURCE, position),
            Evidence("pool_capacity", capacity, "tokens", SOURCE, _capacity_at(ledger)),
            Evidence("tokens_per_request", each, "tokens", SOURCE, facts["load_input_len"].position),
            *(Evidence(f"demand_of_{demand.clients}", demand.tokens, "tokens", SOURCE) for demand in asked),
            *(
                Evidence(f"demand_of_{demand.clients}_share", round(100 * demand.share, 1), "%", SOURCE)
                for demand in asked
            ),
            *_told(ledger, "usage_peak_told", 100, "%"),
            *_told(ledger, "preemptions_told", 1, "preemptions"),
        ),
        explanation=(
            f"Usage is told to fall from {percent(high)} to {percent(low)}. The pool holds {capacity:,} tokens, and"
            f" each request {each:,} at its end: {_in_words(asked)}. {_what_follows(asked)}"
            f"{_steps(asked[0], facts)} No figure here tells a fall by finishing from one by preemption, so this is a"
            " hypothesis."
        ),
        do_now=(
            "Run it once more with VLLM_LOG_STATS_INTERVAL=1 and give this command the engine's log, or its /metrics"
            " page while it runs: a fall with Waiting climbing after it and prompt tokens still counted is lock-step.",
        ),
        change=(
            "If it is: lower --max-num-batched-tokens (to 8192, say), so that the first requests of a wave decode while"
            " the others are still prefilled; and vary lengths or arrival times in the load generator.",
        ),
        wont_help=("More KV memory or fewer clients, if it is: the same happens at any usage.",),
        missing=(
            "why the blocks were freed, finished or preempted: the event stream (monitor doctor tcp://HOST:5757) says"
            " it of each; or usage, Running and Waiting each second around the fall, with vllm:num_preemptions_total"
            " before and some minutes after it, since that counter lags"
        ),
    )


def _in_words(asked: Sequence[Demand]) -> str:
    return " and ".join(f"{d.clients} hold {d.tokens:,}, {percent(d.share)} of it" for d in asked)


def _what_follows(asked: Sequence[Demand]) -> str:
    if min(demand.share for demand in asked) > 1:
        return (
            "That is more than there is, so preemption is a cause as good as requests that, being alike and started"
            " together, end together."
        )
    fits = [str(demand.clients) for demand in asked if demand.share <= 1]
    return (
        f"With {' or '.join(fits)} the pool is never full, so nothing needs to be preempted: requests that are alike"
        " and start together also end together, and the next wave queues while its prompts are computed."
    )


def _steps(asked: Demand, facts: Mapping[str, Fact]) -> str:
    """How many steps the prompts of one wave take, if the budget of a step is known."""
    budget, prompt = number(facts, "max_num_batched_tokens"), number(facts, "load_input_len")
    if not budget or not prompt:
        return ""
    return (
        f" The prompts of a wave of {asked.clients} take at least {math.ceil(asked.clients * prompt / budget):,} steps"
        f" of {budget:,.0f} tokens, in which usage climbs from nothing and next to no output comes."
    )


def _capacity_at(ledger: EngineLedger) -> str:
    facts = ledger.facts
    return facts["max_concurrency" if "max_concurrency" in facts else "kv_cache_size_tokens"].position


def _told(ledger: EngineLedger, name: str, times: int, unit: str) -> Iterator[Evidence]:
    if (figure := number(ledger.facts, name)) is not None:
        yield Evidence(name, round(times * figure, 1), unit, SOURCE, ledger.facts[name].position)
