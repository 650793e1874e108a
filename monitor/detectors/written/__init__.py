"""The evidence in the text of a log or a report beside its statistics: lines, contradictions, and a person's own words.

written_view.py        the text of one engine, as the functions here ask for it
refusals.py            engines that did not start, devices out of memory, profiles that leave something out
planned_settings.py    the settings that a refused start needs
standstill.py          engines that stand still or died
lost_blocks.py         audits, connectors, leases, outer tiers, blocks freed twice
failed_transfers.py    KV transfers that fail or never end
pool_pressure.py       pools and blocks of the wrong size, long requests, empty pools, host memory
hypotheses.py          at most three guesses from a person's words
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from ...ledger.engine_ledger import EngineLedger
from ..detector import Detector, Settings
from ..judgement import TextJudgement, Verdict
from . import failed_transfers, lost_blocks, pool_pressure, refusals, standstill
from .hypotheses import hypotheses
from .written_view import WrittenView

RULES: Final[tuple[Callable[[WrittenView], Iterator[TextJudgement]], ...]] = (
    lost_blocks.audit_surplus,
    lost_blocks.audit_leak,
    lost_blocks.block_freed_twice,
    lost_blocks.free_list_contradicts,
    lost_blocks.held_after_finish,
    lost_blocks.held_between_pages,
    lost_blocks.leases_ran_out,
    lost_blocks.pins_kept,
    failed_transfers.transfers_fail,
    failed_transfers.transfers_counted,
    failed_transfers.fetch_lasts,
    standstill.engine_stalled,
    pool_pressure.request_above_pool,
    pool_pressure.prompt_above_pool,
    pool_pressure.front_end_keeps_requests,
    standstill.socket_thread_died,
    pool_pressure.prefix_never_hit,
    refusals.ran_out_of_memory,
    refusals.graphs_beside_the_pool,
    refusals.graphs_above_the_share,
    pool_pressure.pool_below_one_request,
    pool_pressure.preempted_for_space,
    pool_pressure.block_above_prompts,
    pool_pressure.one_request_holds_much,
    pool_pressure.pool_is_the_memory,
    pool_pressure.host_memory_grows,
)
RULES_WITHOUT_LINES: Final = (
    lost_blocks.held_between_pages,
    standstill.engine_stalled,
    pool_pressure.pool_below_one_request,
    pool_pressure.one_request_holds_much,
)
"""Those that need samples and facts alone. A whole log brings its lines at its end, after thousands of judgements."""
EXPLAIN: Final = ("held.endless-output", "held.pool-reserved", "held.not-memory")
"""Information that answers the report by itself."""


def judge_text(
    ledger: EngineLedger, known: Mapping[str, Verdict], catalogue: Mapping[str, type[Detector[Any]]], settings: Settings
) -> Iterator[TextJudgement]:
    """Yield what lines and words show of `catalogue`'s codes beyond what is `known` already, with its verdict.

    Hypotheses only where nothing is shown at warning or above.
    """
    if ledger.has_stream or not (ledger.reported or ledger.facts or ledger.samples):
        return
    view = WrittenView(ledger, settings)
    verdicts = dict(known)
    for rule in RULES if ledger.reported else RULES_WITHOUT_LINES:
        for judged in rule(view):
            if verdicts.get(judged.code, "cannot-tell") == "cannot-tell" and (
                judged.code not in verdicts or judged.verdict != "cannot-tell"
            ):
                verdicts[judged.code] = judged.verdict
                yield judged
    if not ledger.reported:
        return
    shown = [code for code, verdict in verdicts.items() if verdict != "cannot-tell"]
    explained = "collapse.lockstep" in known or any(code in EXPLAIN for code in shown)
    if not explained and all(catalogue[code].severity == "info" for code in shown):
        yield from hypotheses(view, verdicts, {code: detector.title for code, detector in catalogue.items()})
