"""What a report or a log states of the pool's size and of the load (ledger/demand.py)."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.samples import Fact
from kvscope.monitor.ledger.demand import capacity_tokens

STATED = {"max_concurrency": 5.7, "max_concurrency_tokens": 262_144, "kv_cache_size_tokens": 1_490_000}


@pytest.mark.parametrize(
    ("left_out", "tokens"),
    [
        ((), round(5.7 * 262_144)),
        (("max_concurrency",), 1_490_000),
        (("max_concurrency_tokens",), 1_490_000),
        (("max_concurrency", "kv_cache_size_tokens"), None),
    ],
)
def test_a_pool_holds_its_concurrency_times_the_length_or_its_size_in_tokens(
    left_out: tuple[str, ...], tokens: int | None
) -> None:
    facts = {name: Fact("m@h:1/0", "x:1", name, value) for name, value in STATED.items() if name not in left_out}
    assert capacity_tokens(facts) == tokens
