"""Which request evicted what prompts missed afterwards."""

from __future__ import annotations

from kvscope.monitor.ledger.prefix_reuse import Evictions
from kvscope.monitor.ledger.records import RequestState


def test_what_a_preempted_request_computes_again_is_no_loss_of_the_cache() -> None:
    evictions = Evictions()
    evictions.evict(RequestState(1, "large"), 5, [11, 12], cached_before=10, unused=0, at=1)
    evictions.store([11], at=2, number=2, prompt_blocks=0)
    assert not evictions.culprits
    evictions.store([11, 12], at=3, number=3, prompt_blocks=1)
    (culprit,) = evictions.culprits
    assert (culprit.id, culprit.missed, culprit.missed_at) == ("large", 1, 3)
    assert not evictions.gone
