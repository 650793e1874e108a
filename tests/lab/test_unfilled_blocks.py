"""The truth of requests that wait for room while others hold blocks that they do not fill."""

from __future__ import annotations

import pytest

from kvscope.lab.client_load import Clients
from kvscope.lab.truth.what_happened import decide
from tests.lab.test_drawn_runs import ended, small


@pytest.mark.parametrize(("block_size", "prompt", "unfilled"), [(256, 12, True), (16, 240, False)])
def test_a_request_waits_for_room_that_others_hold_and_do_not_fill(
    block_size: int, prompt: int, unfilled: bool
) -> None:
    load = (Clients("c", at_once=7, until_s=30, prompt=(prompt, prompt), output=(4, 4)),)
    end = ended(small(load=load, engine={"num_gpu_blocks_override": 1 + 1024 // block_size, "block_size": block_size}))
    kinds = {harm.kind for harm in decide(end)}
    assert "queued-for-blocks" in kinds
    assert ("queued-for-unfilled-blocks" in kinds) == unfilled
