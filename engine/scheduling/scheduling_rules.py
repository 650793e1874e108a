"""Rules of scheduling that engines differ in: kvscope's own engine, and vLLM's scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class SchedulingRules:
    """How a scheduler behaves where engines differ. The defaults are those of kvscope's own engine.

    settles_when_planned: blocks enter the prefix cache in the pass that plans their tokens, several blocks of one
    prefix are kept, and windows free the blocks behind them in the request's next pass. Otherwise all of that happens
    once the tokens are computed, with one block a prefix. fences_frees: blocks freed while a step in flight may write
    them become free when it is complete. vLLM does so only with a consuming connector. damps_readmission: after a
    preemption no more requests may run than are left, and one more with each step. awaits_dropped_steps: a preempted
    request is admitted only when the steps in flight that it was part of are over, and those behind it may go first.
    queues_at_front: a preempted request goes to the front, whenever it came.
    """

    settles_when_planned: bool = False
    fences_frees: bool = True
    damps_readmission: bool = True
    awaits_dropped_steps: bool = False
    queues_at_front: bool = False


OWN_RULES: Final = SchedulingRules()
VLLM_RULES: Final = SchedulingRules(
    settles_when_planned=True,
    fences_frees=False,
    damps_readmission=False,
    awaits_dropped_steps=True,
    queues_at_front=True,
)
"""The rules of vLLM 0.32 without a connector, checked step by step in tests/probes/test_vllm_differential.py."""
