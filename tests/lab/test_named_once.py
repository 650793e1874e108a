"""Runs in which two codes look alike to the events, and the truth knows one of them."""

from __future__ import annotations

import pytest

from kvscope.lab.trial import run_trial

NEVER_PUT_BACK = (1353, 2611)
"""Runs of seed 20261212: the head of the queue was preempted once, and those whose KV has come are never put back."""


@pytest.mark.parametrize("number", NEVER_PUT_BACK)
def test_who_is_never_put_back_does_not_wait_behind_the_head(number: int) -> None:
    claims = run_trial(number, 20261212, drawn_from="faults").results["stream"].claims
    assert "stuck.promotion-starved" in {claim.code for claim in claims}
    assert [claim.code for claim in claims if claim.verdict == "confirmed" and not claim.right] == []
