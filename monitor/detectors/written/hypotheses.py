"""At most three hypotheses from a person's report, the most probable first. Their verdict is never above
cannot-tell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from kvscope.monitor.detectors.judgement import TextJudgement
from kvscope.monitor.detectors.written.hypothesis_table import HYPOTHESES, Hypothesis
from kvscope.monitor.detectors.written.pool_pressure import NEARLY_EMPTY
from kvscope.monitor.detectors.written.refusals import REFUSAL_LINES
from kvscope.monitor.detectors.written.written_view import COMPLAINTS, WrittenView, quotes
from kvscope.monitor.events.samples import ReportedEvent
from kvscope.monitor.sources.text_events import PHRASE_PREFIX

MOST: Final = 3
WORTH: Final = 0.5
"""A share of the first one's score: hypotheses below it are not worth a line."""
_NEXT: Final = {
    "leak": (
        "While it lasts, check the pool with nothing running: monitor doctor http://HOST:8000/metrics --timeout 60"
    ),
    "stuck": "While it lasts, check why requests wait: monitor doctor http://HOST:8000/metrics --timeout 30",
    "thrash": "Count preemptions for a minute: monitor doctor http://HOST:8000/metrics --timeout 60",
    "collapse": "Watch it happen: monitor doctor --watch http://HOST:8000/metrics",
    "imbalance": "Give the pages of all ranks at once: monitor doctor http://HOST:8000/metrics --timeout 60",
    "corrupt": "Attach the probe, whose audits compare every block: monitor doctor tcp://HOST:5757",
    "sizing": "Give the whole start-up log, from the first line to the error: monitor doctor FILE",
    "blind": "Compare it with the blocks themselves: monitor doctor tcp://HOST:5757",
}
"""The one command to run next, by family."""
_SHOWN_BY: Final = (
    (("engine_died", "worker_died"), ("process_gone", "crashes")),
    (REFUSAL_LINES, ("refused", "start_fails")),
    (("out_of_memory",), ("out_of_memory",)),
    (("request_preempted", "requests_retracted"), ("preempted",)),
    (("swap_space_exhausted", "last_request_too_large"), ("preempted", "pool_full")),
    (("transfer_failed", "transfer_timed_out"), ("transfer_lost", "remote_load")),
    (("pool_audit_failed",), ("audit", "not_freed")),
    (("freed_twice", "free_list_broken"), ("double_free",)),
    (("tier_allocation_failed",), ("tier_full", "offload")),
)
"""Concepts that lines of these classes show, whether printed or mentioned in a sentence."""
_PROBLEMS: Final = (
    "fails",
    "head_blocks",
    "transfer_lost",
    "flushed",
    "double_free",
    "skipped_free",
    "watchdog",
    "tier_misses",
    "tier_hits_few",
    "bug_label",
)
"""Concepts too vague to count as a complaint, and sufficient to search for a cause."""
_FAILURES: Final = tuple(name for names, _ in _SHOWN_BY for name in names)
_NEXT_OF: Final = {
    "stuck.engine-dead": "Check whether the engine's process exists: ps -eo pid,ppid,stat,cmd | grep -i enginecore",
    "stuck.engine-stalled": "Take the stacks while it hangs: py-spy dump --pid PID of the engine's process",
    "stuck.grammar": "Find what the CPU computes: py-spy dump --pid PID of the engine's process",
    "stuck.front-end": "Compare what clients wait for with what the engine has: curl -s"
    " http://HOST:8000/metrics | grep num_requests",
    "sizing.other-process": (
        "List the processes on the device: nvidia-smi --query-compute-apps=pid,used_memory --format=csv"
    ),
    "leak.external-pins": "Read the tier's state line twice, a minute apart: grep pinned_count FILE | tail",
    "corrupt.stale-remote-read": "Find leases that ended: grep -c 'expired KV blocks' FILE",
}


def hypotheses(view: WrittenView, known: Collection[str], titles: Mapping[str, str]) -> Iterator[TextJudgement]:
    """Yield the possible causes of the report, without `known`, which other functions have judged."""
    if not (view.states(*COMPLAINTS, *_PROBLEMS) or view.mentioned(*_FAILURES)):
        return
    if view.states("feature_request") and not (view.samples or view.mentioned(*_FAILURES)):
        return  # its expected evidence names states that no source reports
    concepts = _concepts(view)
    scored = [(score, row) for row in HYPOTHESES if row.code not in known and (score := _score(row, concepts))]
    scored.sort(key=lambda pair: -pair[0])
    best = {row.code: row for score, row in reversed(scored) if score >= WORTH * scored[0][0]}
    worth = [best[code] for code in dict.fromkeys(row.code for _, row in scored) if code in best][:MOST]
    for rank, row in enumerate(worth, 1):
        yield _hypothesis(view, row, rank, titles[row.code], [other.code for other in worth if other is not row])


def _concepts(view: WrittenView) -> set[str]:
    """Return the concepts that the prose names, and those that statistics and lines show."""
    found = {name.removeprefix(PHRASE_PREFIX) for name in view.reported.names() if name.startswith(PHRASE_PREFIX)}
    if view.mentioned("connector_named") or "kv_connector" in view.facts:
        found.add("connector")
    if view.mentioned("attention_block_size"):
        found |= {"hybrid", "large_block"}
    if view.mentioned("remote_wait"):
        found |= {"remote_load", "waits_for_kv"}
    if view.mentioned("worker_wait", "call_timed_out", "watchdog_expired"):
        found.add("stands_in_log")
    for names, concepts in _SHOWN_BY:
        ended_before = "engine_died" in names and view.mentioned("shut_down", "frame_of_start")
        if view.mentioned(*names) and not ended_before:
            found |= set(concepts)
    if view.samples:
        found |= _of_samples(view)
    return found


def _of_samples(view: WrittenView) -> set[str]:
    last = view.samples[-1]
    found = set()
    if last.running == 0 and last.waiting:
        found.add("waits_unserved")
        if last.usage is not None and last.usage < 0.02:
            found.add("pool_free")
    if last.usage is not None and last.usage >= 0.95:
        found.add("pool_full")
    if last.running and last.generation_tokens_per_s and last.usage is not None and last.usage < 0.95:
        found.add("computes")
        if last.waiting and last.usage < view.settings(NEARLY_EMPTY):
            found.add("waits_with_room")
    return found


def _score(row: Hypothesis, concepts: set[str]) -> float:
    if any(concept in concepts for concept in row.unless):
        return 0.0
    if not all(concepts.intersection(group) for group in row.needs):
        return 0.0
    return 2 * len(row.needs) + sum(weight for concept, weight in row.adds.items() if concept in concepts)


def _hypothesis(view: WrittenView, row: Hypothesis, rank: int, title: str, others: list[str]) -> TextJudgement:
    rests_on = _rests_on(view, row)
    alternatives = f" Equally or less likely: {', '.join(others)}." if others else ""
    return TextJudgement(
        code=row.code,
        engine=view.engine,
        verdict="cannot-tell",
        rank=rank,
        position=rests_on[0].position if rests_on else "",
        evidence=quotes(rests_on),
        explanation=f"Hypothesis {rank}, from the text alone: {title[:1].lower()}{title[1:]}. It is based on"
        f" {_quoted_phrases(rests_on)}.{alternatives}",
        do_now=(_NEXT_OF.get(row.code) or _NEXT[row.code.partition(".")[0]],),
        missing="measurements: the engine's log or metrics while it happens show which hypothesis holds",
    )


def _rests_on(view: WrittenView, row: Hypothesis) -> list[ReportedEvent]:
    concepts = dict.fromkeys([*(name for group in row.needs for name in group), *row.adds])
    by_weight = sorted(concepts, key=lambda name: -row.adds.get(name, 0.0))
    found = [event for concept in by_weight for event in view.phrases(concept)[:1]]
    return found[:4]


def _quoted_phrases(events: list[ReportedEvent]) -> str:
    if not events:
        return "the state that the lines show"
    return ", ".join(f'"{event.quote}" ({event.position})' for event in events)
