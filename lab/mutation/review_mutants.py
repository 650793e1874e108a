"""Mutants that a review of the rules found alive, as these rules are written now: always part of the sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from .mutant_sites import Mutant, mutants_of


class ReviewMutant(NamedTuple):
    """Where it is, and the beginning and the end of its change."""

    what: str
    module: str
    function: str
    before: str
    after: str


RULES: Final = "kvscope.monitor.detectors."
PROBE: Final = "kvscope.monitor.probes.vllm."
REVIEW_MUTANTS: Final = (
    ReviewMutant(
        "a step may take half as long",
        *(f"{RULES}stuck.engine_stalled", "EngineStalled.slower_than_expected", "slower", "0.75"),
    ),
    ReviewMutant(
        "room for the head is not asked",
        *(f"{RULES}thrash.after_retract", "AfterRetract.detect"),
        "head is None or quiet_s < over_s or",
        "-> head is None or quiet_s < over_s or head.cause != Cause.MAX_NUM_SEQS",
    ),
    ReviewMutant(
        "a heartbeat counts as a pass that shows none",
        *("kvscope.monitor.ledger.heartbeat_history", "HeartbeatHistory.add"),
        *("last.scheduler_passes > ", ">= before.scheduler_passes"),
    ),
    ReviewMutant(
        "preemptions in the fall are not asked",
        *(f"{RULES}collapse.lockstep", "Lockstep._fell", "fall >= settings(self.min_share) and"),
        "-> fall >= settings(self.min_share) and after.running <= before.running / 4",
    ),
    ReviewMutant(
        "a shorter slack of leases",
        *(f"{RULES}leak.deferred_blocks", "HELD_LEASE_SLACK_S", "HELD", "2.5"),
    ),
    ReviewMutant(
        "the pool is not compared with max_num_seqs",
        *(f"{RULES}sizing.kv_too_small", "KvTooSmall.detect", "len(recent) <"),
        "-> len(recent) < settings(self.min_preemptions)",
    ),
    ReviewMutant(
        "the encoder is named where blocks are short",
        *(f"{PROBE}wait_causes", "WaitCauses._refused", "request_id in state.without_encoder", "without_encoder"),
    ),
    ReviewMutant(
        "every rank has the address of the first",
        *(f"{PROBE}plugin", "of_rank", "rank == 0 -> ", "rank != 0"),
    ),
    ReviewMutant(
        "the last block of a prompt, always computed, counts",
        *("kvscope.monitor.ledger.prefix_reuse", "with_kept", "prompt.kept > ", ">= COMPUTED_ALWAYS + prompt.again"),
    ),
)


def review_mutants(root: Path) -> Iterator[Mutant]:
    """Yield them. Raises LookupError for one that the rules do not have any more."""
    for wanted in REVIEW_MUTANTS:
        path = root / f"{wanted.module.removeprefix('kvscope.').replace('.', '/')}.py"
        found = [
            one
            for one in mutants_of(path, wanted.module)
            if one.function == wanted.function
            and one.text.startswith(wanted.before)
            and one.text.endswith(wanted.after)
        ]
        if not found:
            raise LookupError(f"{wanted.what}: {wanted.module} {wanted.function}")
        yield found[0]
