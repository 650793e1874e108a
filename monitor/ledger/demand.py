"""Demand and capacity: the sums of a report that states both a load and a pool.

capacity = concurrency x tokens per request, as the engine prints them; else the tokens that it prints. On hybrid
           models vLLM up to 0.19 prints too few tokens, so the product counts first.
demand   = clients x (tokens of a prompt + tokens generated for it)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from ..contract.samples import Fact


class Demand(NamedTuple):
    """The peak demand of a number of requests: tokens, and as a share of the pool."""

    clients: int
    tokens: int
    share: float


def capacity_tokens(facts: Mapping[str, Fact]) -> int | None:
    """Return how many tokens the pool holds, if the engine reported it."""
    concurrency, each = number_fact(facts, "max_concurrency"), number_fact(facts, "max_concurrency_tokens")
    if concurrency and each:
        return round(concurrency * each)
    tokens = number_fact(facts, "kv_cache_size_tokens")
    return round(tokens) if tokens else None


def tokens_per_request(facts: Mapping[str, Fact]) -> int | None:
    """Prompt and output of each request of the load."""
    prompt, output = number_fact(facts, "load_input_len"), number_fact(facts, "load_output_len")
    return None if prompt is None or output is None else round(prompt + output)


def demands(facts: Mapping[str, Fact]) -> list[Demand]:
    """Return the demand of each number of clients that is named, in that order, or nothing if an input is missing."""
    capacity, each = capacity_tokens(facts), tokens_per_request(facts)
    if not capacity or not each or "load_concurrencies" not in facts:
        return []
    named = [int(text) for text in re.findall(r"\d{1,9}", str(facts["load_concurrencies"].value))]
    return [Demand(clients, clients * each, clients * each / capacity) for clients in named]


def number_fact(facts: Mapping[str, Fact], name: str) -> float | None:
    """Return the number of that name, or None if it is missing or is not a number."""
    fact = facts.get(name)
    return None if fact is None or isinstance(fact.value, str) else float(fact.value)


def capacity_at(facts: Mapping[str, Fact]) -> str:
    """Return where the engine reported what capacity_tokens() is from."""
    return facts["max_concurrency" if "max_concurrency" in facts else "kv_cache_size_tokens"].position


def steps_text(asked: Demand, facts: Mapping[str, Fact]) -> str:
    """Return how many steps the prompts of one wave take, or nothing if the budget of a step is not known."""
    budget, prompt = number_fact(facts, "max_num_batched_tokens"), number_fact(facts, "load_input_len")
    if not budget or not prompt:
        return ""
    return (
        f" The prompts of a wave of {asked.clients} take at least {math.ceil(asked.clients * prompt / budget):,}"
        f" steps of {budget:,.0f} tokens. During these, usage climbs from zero with almost no output."
    )
