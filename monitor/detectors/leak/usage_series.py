"""Usage, Running and prompt throughput over time: what leaks found from metrics or a log have in common."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from ...contract.samples import Sample
from ...ledger.engine_ledger import EngineLedger
from ...ledger.pool_forecast import Floor, IdleFloors
from ...ledger.sample_window import is_idle_sample
from ..judgement import Evidence
from ..sample_math import DEFAULT_INTERVAL_S, apart_s, prompt_tokens_until, spaced

PRODUCER_ROLES: Final = ("kv_producer", "prefill")
CONSUMER_ROLES: Final = ("kv_consumer", "decode")
ConnectorKnowledge = Literal["none", "producer", "consumer", "configured", "unknown"]


class UsageSeries(NamedTuple):
    """Samples with usage, Running and the prompt tokens taken in until each, as columns."""

    samples: Sequence[Sample]
    usage: list[float]
    running: list[float]
    prompt_tokens: list[float]


class UsageFit(NamedTuple):
    """Usage against the prompt tokens taken in, and against the number of running requests."""

    slope: float
    """Share of the pool for each thousand prompt tokens taken in."""
    r_squared: float
    correlation: float


class ChangeFit(NamedTuple):
    """Changes of usage between samples, fitted to the prompt tokens taken in between them."""

    correlation: float
    constant_share: float
    """The part of the rise that comes in every interval regardless of the prompts, as growth by decoding does."""
    largest_changes: list[float]
    """Rises of usage, the largest first, in shares of the pool."""


METRICS_MISSING = (
    "attach the event stream (monitor doctor tcp://HOST:5757). It shows which request owns each block and whether its"
    " free was deferred, which also rules out leak.unaccounted."
)


def usage_of(sample: Sample) -> float:
    """Return the usage, 0.0 where it is not known."""
    return sample.usage or 0.0


def samples_with_usage(ledger: EngineLedger) -> Sequence[Sample]:
    """Return the samples that have usage and the number of running requests."""
    return ledger.samples.with_usage


def connector_knowledge(ledger: EngineLedger) -> ConnectorKnowledge:
    """Return what the engine's own lines show of a KV connector, which may keep blocks of finished requests on purpose.

    "none" only where the engine printed its arguments and they name no connector.
    """
    role = ledger.facts.get("kv_role")
    if role is not None and role.value in PRODUCER_ROLES:
        return "producer"
    if role is not None and role.value in CONSUMER_ROLES:
        return "consumer"
    if "kv_connector" in ledger.facts or ledger.reported.of("connector_named"):
        return "configured"
    return "none" if "non_default_args" in ledger.facts else "unknown"


def idle_usage_floors(ledger: EngineLedger) -> list[Floor]:
    """Return the rising series of usage at which the engine drained to idle. `at` is an index of the samples above."""
    floors = IdleFloors()
    for index, sample in ledger.samples.around_idle():  # a busy sample after another changes no floor
        worked = bool(sample.generation_tokens_per_s)
        floors.look(index, idle=is_idle_sample(sample), worked=worked, in_use=usage_of(sample))
    return floors.rising()


def series_of(samples: Sequence[Sample]) -> UsageSeries:
    """Return the samples as columns, those too close together left out."""
    taken_in = prompt_tokens_until(samples)
    kept = sorted({*spaced(samples), len(samples) - 1})
    return UsageSeries(
        [samples[n] for n in kept],
        [usage_of(samples[n]) for n in kept],
        [float(samples[n].running or 0) for n in kept],
        [taken_in[n] for n in kept],
    )


def fit_of(series: UsageSeries) -> UsageFit | None:
    """Fit usage to prompt tokens, or None where there are too few points."""
    thousands = [tokens / 1000 for tokens in series.prompt_tokens]
    if len(thousands) < 3 or len(set(thousands)) < 2 or len(set(series.usage)) < 2:
        return None
    slope, _ = statistics.linear_regression(thousands, series.usage)
    r_squared = statistics.correlation(thousands, series.usage) ** 2
    correlation = statistics.correlation(series.running, series.usage) if len(set(series.running)) > 1 else 0.0
    return UsageFit(slope, r_squared, correlation)


def fit_changes(series: UsageSeries) -> ChangeFit | None:
    """Fit the changes of usage to the tokens taken in meanwhile, or None where either never varies.

    Two series that both rise correlate whatever causes them. Their changes correlate only where one follows the other.
    """
    changes = [later - earlier for earlier, later in pairwise(series.usage)]
    tokens = [later - earlier for earlier, later in pairwise(series.prompt_tokens)]
    rise = series.usage[-1] - series.usage[0]
    if len(changes) < 3 or len(set(changes)) < 2 or len(set(tokens)) < 2 or rise <= 0:
        return None
    _, constant = statistics.linear_regression(tokens, changes)
    return ChangeFit(
        statistics.correlation(tokens, changes), constant * len(changes) / rise, sorted(changes, reverse=True)
    )


def window_s(samples: Sequence[Sample], start: int = 0) -> float:
    """Return the seconds from sample `start` to the last. Samples without times count vLLM's interval each, the first
    one's included.

    An engine's line without a time covers the interval before it.
    """
    apart = apart_s(samples[start], samples[-1])
    return apart if apart is not None else (len(samples) - start) * DEFAULT_INTERVAL_S


def lasted_s(ledger: EngineLedger, samples: Sequence[Sample], start: int) -> float:
    """Return how long the window lasts: vLLM logs nothing when nothing moves, so until the log's own end."""
    began = samples[start].at_ns
    return (ledger.now_ns - began) / 1e9 if began else (len(samples) - 1 - start) * DEFAULT_INTERVAL_S


def ratchet_evidence(series: UsageSeries) -> list[Evidence]:
    """Return the evidence of usage that follows prompts."""
    first, last = series.samples[0].position, series.samples[-1].position
    span, source = f"{first} to {last}", series.samples[-1].source
    evidence = []
    fit, changes = fit_of(series), fit_changes(series)
    if fit is not None:
        evidence += [
            Evidence("usage_per_1000_prompt_tokens", round(100 * fit.slope, 3), "%", source, span),
            Evidence("r_squared", round(fit.r_squared, 4), "", source, span),
            Evidence("correlation_with_running", round(fit.correlation, 3), "", source, span),
        ]
    if changes is not None:
        evidence.append(
            Evidence("correlation_of_changes_with_prompts", round(changes.correlation, 3), "", source, span)
        )
    per_running = [100 * u / max(r, 1.0) for u, r in zip(series.usage, series.running, strict=True)]
    return [
        *evidence,
        Evidence("usage_per_running_first", round(per_running[0], 1), "%", source, first),
        Evidence("usage_per_running_last", round(per_running[-1], 1), "%", source, last),
    ]
