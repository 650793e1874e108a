"""At most three hypotheses from a person's report, the most probable first. Their verdict is never above cannot-tell.

HYPOTHESES has which concepts of a report suggest which finding. A row needs one concept of each group in `needs`. Each
of these groups counts 2, and each concept of `adds` that the report names counts its weight. `unless` names concepts
that rule it out. The weights reflect what distinguishes a class from its neighbours: a concept that only one class has
weighs 3, one that two or three share 1 or 2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from ...contract.samples import ReportedEvent
from ...sources.text_events import PHRASE_PREFIX
from ..held.not_memory import NotMemory
from ..judgement import TextJudgement
from .refusals import REFUSAL_LINES
from .written_view import COMPLAINTS, WrittenView, quotes


class Hypothesis(NamedTuple):
    """A finding code, what a report must name for it, and what speaks for it more."""

    code: str
    needs: tuple[tuple[str, ...], ...]
    adds: Mapping[str, float]
    unless: tuple[str, ...] = ()


STANDS: Final = ("stuck", "waits_unserved", "unanswered")
HYPOTHESES: Final = (
    # ---- never freed
    Hypothesis(
        "leak.remote-load-lost",
        (("aborted", "transfer_lost"), ("remote_load",), ("not_freed",)),
        {"aborted": 2, "connector": 1, "disaggregated": 1},
    ),
    Hypothesis(
        "leak.lease-burst",
        (("lease",), ("not_freed", "pool_full", "remote_load", *STANDS)),
        {"lease": 2, "disaggregated": 1, "aborted": 1, "finished_request": 1},
        ("read_late",),
    ),
    Hypothesis(
        "leak.finished-held",
        (("not_freed",), ("finished_request", "connector", "disaggregated", "pool_full", "drains")),
        {"finished_request": 2, "connector": 1, "pool_full": 1},
        ("encoder_cache", "pinned"),
    ),
    Hypothesis(
        "leak.rising-floor",
        (("not_freed",), ("drains", "pool_full")),
        {"drains": 3},
        ("connector", "remote_load", "pinned"),
    ),
    Hypothesis(
        "leak.unaccounted",
        (("not_freed",), ("skipped_free", "audit", "aborted", "preempted")),
        {"skipped_free": 3, "audit": 3, "aborted": 1},
        ("remote_load", "encoder_cache"),
    ),
    Hypothesis("leak.session-pinned", (("session",), ("not_freed", "pool_full")), {"session": 3}),
    Hypothesis(
        "leak.external-pins",
        (("pinned",), ("offload", "connector", "not_freed")),
        {"pinned": 2, "offload": 2, "not_freed": 1},
    ),
    Hypothesis(
        "leak.encoder-cache",
        (("encoder_cache",), ("not_freed",)),
        {"encoder_cache": 2, "not_freed": 1, "zero_tokens": 1},
    ),
    Hypothesis(
        "leak.idle-not-polled", (("idle_engine",), ("not_freed", "disaggregated", "connector")), {"idle_engine": 3}
    ),
    Hypothesis("leak.deferred-free-stalled", (("fenced",), ("not_freed", *STANDS)), {"fenced": 3}),
    # ---- stuck
    Hypothesis(
        "stuck.remote-load",
        (("remote_load", "connector"), (*STANDS, "lease", "transfer_lost", "waits_for_kv")),
        {"remote_load": 2, "transfer_lost": 2, "disaggregated": 1},
        ("front_end_only", "transfer_done"),
    ),
    Hypothesis(
        "stuck.parked-loads",
        (("remote_load", "offload"), STANDS, ("loads_done", "head_blocks", "offload")),
        {"loads_done": 2, "head_blocks": 2, "offload": 1, "pool_full": 1},
        ("pinned",),
    ),
    Hypothesis("stuck.lost-wakeup", (("wake_lost",), STANDS), {"wake_lost": 2, "remote_load": 1, "connector": 1}),
    Hypothesis(
        "stuck.promotion-starved", (("waits_unserved",), ("slots", "loads_done")), {"loads_done": 2, "slots": 1}
    ),
    Hypothesis(
        "stuck.slots-exhausted",
        (("slots", "waits_with_room"), (*STANDS, "head_blocks")),
        {"slots": 2, "pool_free": 2, "waits_with_room": 2},
        ("encoder_cache",),
    ),
    Hypothesis(
        "stuck.never-fits",
        (("too_large", "pool_overridden", "pool_full", "waits_unserved"), STANDS),
        {"too_large": 3, "pool_overridden": 3, "head_blocks": 1, "pool_free": 0.5},
        ("computes", "encoder_cache", "grammar", "process_gone", "multimodal"),
    ),
    Hypothesis(
        "stuck.never-fits",
        (("too_large",), STANDS),
        {"too_large": 3, "multimodal": 1},
        ("computes", "encoder_cache", "grammar", "process_gone"),
    ),
    Hypothesis(
        "stuck.self-preempt",
        (("preempted", "pool_full"), STANDS),
        {"preempted": 1, "repeats": 2, "pool_full": 1},
        ("disaggregated", "offload"),
    ),
    Hypothesis("stuck.grammar", (("grammar",), (*STANDS, "slow")), {"grammar": 4}),
    Hypothesis(
        "stuck.zero-token", (("zero_tokens",), (*STANDS, "repeats")), {"zero_tokens": 2, "hybrid": 2, "repeats": 1}
    ),
    Hypothesis(
        "stuck.encoder-budget",
        (("encoder_cache", "multimodal"), (*STANDS, "zero_tokens")),
        {"encoder_cache": 2, "too_large": 2, "zero_tokens": 1},
    ),
    Hypothesis(
        "stuck.head-of-line", (("head_blocks",), (*STANDS, "slow")), {"head_blocks": 2}, ("offload", "encoder_cache")
    ),
    Hypothesis(
        "stuck.engine-dead",
        (("process_gone",), ("answers_health", "waits_unserved", "crashes", "fails", *STANDS)),
        {"process_gone": 3, "answers_health": 2},
        ("out_of_memory",),
    ),
    Hypothesis("stuck.rank-diverged", (("rank_stops",), ("ranks",), STANDS), {"rank_stops": 2}),
    Hypothesis(
        "stuck.engine-stalled",
        ((*STANDS, "stands_in_log", "watchdog"),),
        {"stands_in_log": 4, "watchdog": 4, "answers_health": 1, "stuck": 0.5},
        ("unequal", "prefix_misses", "computes"),
    ),
    Hypothesis(
        "stuck.front-end", (("front_end",), ("unanswered", "stuck")), {"unanswered": 3}, ("not_freed", "process_gone")
    ),
    Hypothesis(
        "stuck.outer-tier",
        (("tier_full",), ("offload", "connector"), (*STANDS, "slow", "crashes", "fails", "not_stored")),
        {"tier_full": 3},
    ),
    # ---- thrash and collapse
    Hypothesis("thrash.after-retract", (("after_retraction",),), {"after_retraction": 3, "slow": 1, "preempted": 1}),
    Hypothesis(
        "thrash.preemption",
        (("preempted",), ("repeats", "slow", "pool_full", *STANDS)),
        {"repeats": 3, "preempted": 1, "slow": 1},
        ("remote_load",),
    ),
    Hypothesis(
        "thrash.cascade",
        (("preempted",), ("repeats",), ("alike", "not_freed", "frees_nothing")),
        {"alike": 2, "frees_nothing": 3},
        ("remote_load",),
    ),
    Hypothesis("collapse.preempt-all", (("preempted",), ("alike",), ("usage_falls", *STANDS)), {"usage_falls": 2}),
    Hypothesis(
        "collapse.lockstep",
        (("usage_falls",), ("waits_unserved", "alike", "slow", "preempted", *STANDS)),
        {"usage_falls": 3, "alike": 1},
    ),
    Hypothesis("collapse.prefix-hits", (("prefix_misses",),), {"prefix_misses": 3, "hybrid": 2, "shared_prompts": 1}),
    Hypothesis(
        "sizing.block-inflated", (("large_block",), ("prefix_misses", "hybrid", "memory_taken")), {"large_block": 1}
    ),
    Hypothesis("collapse.cache-flushed", (("flushed",),), {"flushed": 2}),
    Hypothesis(
        "collapse.outer-hits",
        (("tier_misses", "tier_hits_few"), ("connector", "offload")),
        {"tier_misses": 2, "tier_hits_few": 3},
    ),
    Hypothesis("imbalance.ranks", (("ranks",), ("unequal",)), {"unequal": 3, "waits_unserved": 1}),
    # ---- corruption
    Hypothesis("corrupt.double-free", (("double_free",),), {"double_free": 4, "wrong_output": 2}),
    Hypothesis(
        "corrupt.use-after-free",
        (("reused_early", "kv_corrupted"),),
        {"reused_early": 3, "kv_corrupted": 2, "wrong_output": 4},
        ("read_late",),
    ),
    Hypothesis(
        "corrupt.use-after-free",
        (("wrong_output",), ("prefix_caching", "shared_prompts", "preempted", "aborted", "offload", "connector")),
        {"wrong_output": 2},
        ("read_late", "process_gone"),
    ),
    Hypothesis(
        "corrupt.stale-remote-read",
        (("read_late", "transfer_lost"), ("connector", "disaggregated", "remote_load"), ("wrong_output", "read_late")),
        {"read_late": 3, "wrong_output": 4, "kv_corrupted": 2},
    ),
    # ---- sizing
    Hypothesis(
        "sizing.refused-start",
        (("start_fails", "refused"), ("no_room_for_pool", "too_large", "out_of_memory", "refused")),
        {"no_room_for_pool": 2, "refused": 3},
    ),
    Hypothesis(
        "sizing.bad-suggestion",
        (("advice_wrong",), ("no_room_for_pool", "out_of_memory", "start_fails")),
        {"advice_wrong": 2},
    ),
    Hypothesis(
        "sizing.kv-too-large",
        (("out_of_memory",),),
        {"out_of_memory": 2, "graphs": 2},
        ("no_room_for_pool", "host_process_killed"),
    ),
    Hypothesis(
        "sizing.elsewhere", (("out_of_memory",),), {"out_of_memory": 1}, ("no_room_for_pool", "host_process_killed")
    ),
    Hypothesis(
        "sizing.other-process",
        (
            ("other_process", "memory_left_behind"),
            ("out_of_memory", "start_fails", "no_room_for_pool", "memory_taken", "fails", "refused"),
        ),
        {"other_process": 3},
    ),
    Hypothesis("sizing.other-process", (("memory_left_behind",),), {"memory_left_behind": 4}),
    Hypothesis("sizing.smallest-worker", (("unlike_devices",),), {"unlike_devices": 2}),
    Hypothesis(
        "sizing.kv-too-small",
        (("pool_full", "no_room_for_pool"), ("slow", "preempted", "waits_unserved", "stuck", "not_freed", "few_fit")),
        {"preempted": 1, "slow": 1, "few_fit": 2},
        ("connector", "remote_load"),
    ),
    # ---- information
    Hypothesis("blind.metric-wrong", (("metric_wrong",),), {"metric_wrong": 3}),
)
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
    (("kv_overwritten",), ("wrong_output", "kv_corrupted")),
    (("kv_incomplete",), ("wrong_output", "kv_corrupted", "transfer_lost", "remote_load")),
    (("tier_drains",), ("stuck", "offload", "remote_load", "transfer_lost")),
    (("pool_audit_failed",), ("audit", "not_freed")),
    (("freed_twice", "free_list_broken"), ("double_free",)),
    (("unpinned_twice",), ("double_free", "offload")),
    (("tier_allocation_failed", "tier_refuses"), ("tier_full", "offload")),
)
"""Concepts that lines of these classes show, whether printed or mentioned in a sentence."""
_PROBLEMS: Final = (
    "fails",
    "head_blocks",
    "few_fit",
    "memory_left_behind",
    "not_stored",
    "transfer_lost",
    "flushed",
    "double_free",
    "skipped_free",
    "watchdog",
    "tier_misses",
    "tier_hits_few",
    "bug_label",
    "unequal",
    "kv_corrupted",
    "reused_early",
    "read_late",
)
"""Concepts too vague to count as a complaint, and sufficient to search for a cause."""
_FAILURES: Final = tuple(name for names, _ in _SHOWN_BY for name in names)
_NEXT_OF: Final = {
    "stuck.engine-dead": "Check whether the engine's process exists: ps -eo pid,ppid,stat,cmd | grep -i enginecore",
    "stuck.engine-stalled": "Take the stacks while it hangs: py-spy dump --pid PID of the engine's process",
    "stuck.grammar": "Find what the CPU computes: py-spy dump --pid PID of the engine's process",
    "stuck.front-end": "Compare what clients wait for with what the engine has: curl -s http://HOST:8000/metrics | grep"
    " num_requests",
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
        yield _hypothesis(view, row, rank, titles[row.code])


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
    elif view.lines("request_rejected") and "stands_in_log" not in found:
        found -= {"stuck", "unanswered", "fails"}  # the server answers, and says that it will not serve the request
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
        if last.waiting and last.usage < view.settings(NotMemory.max_usage):
            found.add("waits_with_room")
    return found


def _score(row: Hypothesis, concepts: set[str]) -> float:
    if any(concept in concepts for concept in row.unless):
        return 0.0
    if not all(concepts.intersection(group) for group in row.needs):
        return 0.0
    return 2 * len(row.needs) + sum(weight for concept, weight in row.adds.items() if concept in concepts)


def _hypothesis(view: WrittenView, row: Hypothesis, rank: int, title: str) -> TextJudgement:
    rests_on = _rests_on(view, row)
    says = f"The text says {_quoted_phrases(rests_on)}" if rests_on else "The lines show such a state"
    return TextJudgement(
        code=row.code,
        engine=view.engine,
        verdict="cannot-tell",
        severity="none",
        rank=rank,
        position=rests_on[0].position if rests_on else "",
        evidence=quotes(rests_on),
        explanation=f"Hypothesis {rank}, from the text alone: {title[:1].lower()}{title[1:]}. {says}.",
        do_now=(_NEXT_OF.get(row.code) or _NEXT[row.code.partition(".")[0]],),
        missing="the engine's log or metrics while it happens: they show which hypothesis holds",
    )


def _rests_on(view: WrittenView, row: Hypothesis) -> list[ReportedEvent]:
    concepts = dict.fromkeys([*(name for group in row.needs for name in group), *row.adds])
    by_weight = sorted(concepts, key=lambda name: -row.adds.get(name, 0.0))
    found = [event for concept in by_weight for event in view.phrases(concept)[:1]]
    return found[:4]


def _quoted_phrases(events: list[ReportedEvent]) -> str:
    return ", ".join(f'"{event.quote}" ({event.position})' for event in events)
