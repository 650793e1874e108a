"""The evidence in the text of a log or a report beside its statistics: lines, contradictions, and a person's own words.

written_view.py        the text of one engine, as the functions here ask for it
profile_sums.py        memory profiles that leave something out
refusals.py            engines that did not start, devices out of memory
standstill.py          engines that stand still or died
lost_blocks.py         audits, connectors, leases, outer tiers
broken_pools.py        blocks freed twice, free lists that contradict themselves
failed_transfers.py    KV transfers that fail or never end
host_memory.py         growth of memory that is not the device's
pool_pressure.py       pools and blocks of the wrong size, long requests, empty pools
contradictions.py      numbers that cannot be right
hypothesis_table.py    which concepts of a report suggest which finding
hypotheses.py          at most three of them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import TextJudgement, Verdict
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.detectors.written.broken_pools import block_freed_twice, free_list_contradicts
from kvscope.monitor.detectors.written.failed_transfers import fetch_lasts, transfers_fail
from kvscope.monitor.detectors.written.host_memory import host_memory_grows
from kvscope.monitor.detectors.written.hypotheses import hypotheses
from kvscope.monitor.detectors.written.lost_blocks import (
    audit_leak,
    audit_surplus,
    held_after_finish,
    leases_ran_out,
    pins_kept,
)
from kvscope.monitor.detectors.written.pool_pressure import (
    block_above_prompts,
    front_end_keeps_requests,
    one_request_holds_much,
    pool_below_one_request,
    pool_is_the_memory,
    preempted_for_space,
    prefix_never_hit,
    request_above_pool,
)
from kvscope.monitor.detectors.written.profile_sums import graphs_above_the_share
from kvscope.monitor.detectors.written.refusals import (
    graphs_beside_the_pool,
    ran_out_of_memory,
)
from kvscope.monitor.detectors.written.standstill import engine_stalled, socket_thread_died
from kvscope.monitor.detectors.written.written_view import WrittenView
from kvscope.monitor.ledger.engine_ledger import EngineLedger

RULES: Final[tuple[Callable[[WrittenView], Iterator[TextJudgement]], ...]] = (
    audit_surplus,
    audit_leak,
    block_freed_twice,
    free_list_contradicts,
    held_after_finish,
    leases_ran_out,
    pins_kept,
    transfers_fail,
    fetch_lasts,
    engine_stalled,
    request_above_pool,
    front_end_keeps_requests,
    socket_thread_died,
    prefix_never_hit,
    ran_out_of_memory,
    graphs_beside_the_pool,
    graphs_above_the_share,
    pool_below_one_request,
    preempted_for_space,
    block_above_prompts,
    one_request_holds_much,
    pool_is_the_memory,
    host_memory_grows,
)
EXPLAIN: Final = ("held.endless-output", "held.pool-reserved", "held.not-memory")
"""Information that answers the report by itself."""


def judge_text(
    ledger: EngineLedger,
    known: Mapping[str, Verdict],
    catalogue: Mapping[str, type[Detector[Any]]],
    settings: Settings,
) -> Iterator[TextJudgement]:
    """Yield what lines and words show of `catalogue`'s codes beyond what is `known` already, with its verdict.

    Hypotheses only where nothing is shown at warning or above.
    """
    if ledger.has_stream or not (ledger.reported or ledger.facts or ledger.samples):
        return
    view = WrittenView(ledger, settings)
    verdicts = dict(known)
    for rule in RULES:
        for judged in rule(view):
            if verdicts.get(judged.code, "cannot-tell") == "cannot-tell" and (
                judged.code not in verdicts or judged.verdict != "cannot-tell"
            ):
                verdicts[judged.code] = judged.verdict
                yield judged
    shown = [code for code, verdict in verdicts.items() if verdict != "cannot-tell"]
    explained = "collapse.lockstep" in known or any(code in EXPLAIN for code in shown)
    if not explained and all(catalogue[code].severity == "info" for code in shown):
        yield from hypotheses(view, verdicts, {code: detector.title for code, detector in catalogue.items()})
