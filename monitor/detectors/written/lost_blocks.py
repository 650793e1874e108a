"""Blocks without an owner or with one that waits, as audits, connectors and outer tiers report them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvscope.monitor.detectors.judgement import Evidence, TextJudgement
from kvscope.monitor.detectors.leak.held_from_samples import IDLE_FLOOR
from kvscope.monitor.detectors.written.written_view import WrittenView, number_of, quotes, seconds_between
from kvscope.monitor.events.samples import ReportedEvent, Sample
from kvscope.monitor.text import counted, percent

HELD_LINES: Final = 2
"""Not a threshold: one line shows a state, and two that it lasts."""


def audit_leak(view: WrittenView) -> Iterator[TextJudgement]:
    """SGLang's audit at idle: tokens that are neither free nor evictable nor protected."""
    lines = [line for line in view.lines("pool_audit_failed") if (number_of(line, "unowned") or 0) > 0]
    slots = view.lines("slot_audit_failed")
    if not lines:
        return
    line = lines[0]
    unowned = number_of(line, "unowned") or 0
    lost_slots = sum((number_of(slot, "total") or 0) - (number_of(slot, "available") or 0) for slot in slots[:1])
    yield TextJudgement(
        code="leak.unaccounted",
        engine=view.engine,
        verdict="likely",
        since_ns=line.at_ns or 0,
        position=line.position,
        evidence=(*_audit_numbers(line, unowned), *quotes([*lines[:2], *slots[:1]])),
        explanation=(
            f"{unowned:,.0f} of {number_of(line, 'total') or 0:,.0f} tokens have no owner: {_sum_of(line)}. The"
            f" audit runs"
            " when nothing is running, so that no request can hold them."
            + (f" {counted(round(lost_slots), 'request slot')} is also missing." if lost_slots else "")
            + " A counter with the same error would look the same."
        ),
        do_now=("Restart the engine during a quiet time: only a restart frees the tokens.",),
        change=(
            "Find the request before the line: an abort, a retraction or a chunked prefill whose free was skipped."
            " This is an engine bug: report it with these sums, and try another release.",
        ),
        wont_help=(
            "A larger --mem-fraction-static: the pool also fills, only later.",
            "Flushing the cache: they are not in it.",
        ),
        missing="which request had them: a log with --log-requests, or the event stream of a probe",
    )


def audit_surplus(view: WrittenView) -> Iterator[TextJudgement]:
    """SGLang's audit at idle: more is free and evictable than there is."""
    lines = [line for line in view.lines("pool_audit_failed") if (number_of(line, "unowned") or 0) < 0]
    if not lines:
        return
    line = lines[0]
    surplus = -(number_of(line, "unowned") or 0)
    yield TextJudgement(
        code="corrupt.double-free",
        engine=view.engine,
        verdict="likely",
        since_ns=line.at_ns or 0,
        position=line.position,
        evidence=(*_audit_numbers(line, -surplus), *quotes(lines)),
        explanation=(
            f"{surplus:,.0f} tokens more are free or evictable than the pool of {number_of(line, 'total') or 0:,.0f}"
            f" has: {_sum_of(line)}. The message calls it a leak, but it is the opposite: something was freed twice,"
            " and two requests may receive the same memory. A counter with the same error would look the same."
        ),
        do_now=(
            "Restart the engine, and treat answers since the last restart as suspect: requests may have shared memory.",
        ),
        change=(
            "Report it with these sums. Until it is fixed, disable newer features in the command (page size, mixed"
            " chunks, speculative decoding, overlap).",
        ),
        wont_help=("More memory.", "Ignoring the check: it reports the bug and does not cause it."),
        missing="which request was freed twice: the event stream of a probe",
    )


def _audit_numbers(line: ReportedEvent, unowned: float) -> tuple[Evidence, ...]:
    names = ("total", "available", "evictable", "protected")
    return (
        Evidence("unowned_tokens", round(unowned), "tokens", "log", line.position),
        *(Evidence(f"{name}_tokens", line.fields[name], "tokens", "log", line.position) for name in names),
    )


def _sum_of(line: ReportedEvent) -> str:
    total, free = number_of(line, "total") or 0, number_of(line, "available") or 0
    evictable, protected = number_of(line, "evictable") or 0, number_of(line, "protected") or 0
    return (
        f"{total:,.0f} - {free:,.0f} free - {evictable:,.0f} evictable - {protected:,.0f} protected ="
        f" {total - free - evictable - protected:,.0f}"
    )


def slots_leaked(view: WrittenView) -> Iterator[TextJudgement]:
    """SGLang's audit of request slots."""
    lines = view.lines("slot_audit_failed")
    if not lines or any((number_of(line, "unowned") or 0) > 0 for line in view.lines("pool_audit_failed")):
        return
    line = lines[0]
    missing = (number_of(line, "total") or 0) - (number_of(line, "available") or 0)
    yield TextJudgement(
        code="stuck.slots-exhausted",
        engine=view.engine,
        verdict="likely",
        since_ns=line.at_ns or 0,
        position=line.position,
        evidence=(Evidence("missing_slots", round(missing), "slots", "log", line.position), *quotes(lines)),
        explanation=(
            f"{counted(round(missing), 'request slot')} of {number_of(line, 'total') or 0:,.0f} belong to no request"
            " while nothing is running. Once all are gone, the engine admits no request, however much memory is"
            " free."
        ),
        do_now=("Restart the engine during a quiet time.",),
        change=("Report it to the engine's project. A higher --max-running-requests only delays it.",),
        wont_help=("More KV memory.",),
        missing="which request kept its slot",
    )


def held_after_finish(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a pool that stays in use with nothing running, while a connector delays frees."""
    idle = _idle_end(view.samples, view.settings(IDLE_FLOOR))
    delayed = view.lines("free_delayed")
    if len(idle) < HELD_LINES or not (delayed or view.mentioned("connector_named") or "kv_connector" in view.facts):
        return
    last = idle[-1]
    stands = view.states("stuck", "waits_unserved", "not_freed")
    if not stands:
        return  # a consumer may still fetch them
    usage = last.usage or 0.0
    held_s = seconds_between(idle[0], last, len(idle))
    yield TextJudgement(
        code="leak.finished-held",
        engine=view.engine,
        verdict="likely" if delayed else "cannot-tell",
        since_ns=idle[0].at_ns or 0,
        position=idle[0].position,
        evidence=(
            Evidence("usage_with_nothing_running", round(100 * usage, 1), "%", "log", last.position),
            Evidence("held_for", round(held_s, 1), "s", "log"),
            Evidence("delayed_frees", view.reported.count("free_delayed"), "lines", "log"),
            *quotes([*delayed, *view.phrases("stuck", "not_freed")[:1]]),
        ),
        explanation=(
            f"{percent(usage)} of the pool stays in use with nothing running or waiting: no live request holds it."
            + (
                f" The connector delayed freeing {counted(view.reported.count('free_delayed'), 'finished request')},"
                " and nothing shows that the other side fetched the blocks."
                if delayed
                else " A KV connector is configured, which may delay frees."
            )
            + " The report says that no request is served anymore. A slow consumer would look the same for a while."
        ),
        do_now=("Restart this instance: once the completion is lost, only a restart frees the blocks.",)
        if delayed
        else ("Watch usage for the duration of the connector's lease: it falls if the consumer is only slow.",),
        change=("Give the connector a lease, turn off its asynchronous load, or upgrade it: it loses completions.",),
        wont_help=("A larger pool: it also fills, only later.",),
        missing="which request owns each block: the event stream of a probe on this instance",
    )


def _idle_end(samples: Sequence[Sample], least_usage: float) -> list[Sample]:
    """Return the last lines with nothing running or waiting and blocks in use."""
    idle: list[Sample] = []
    for sample in reversed(samples):
        if sample.running or sample.waiting or sample.deferred or (sample.usage or 0) <= least_usage:
            break
        idle.append(sample)
    return idle[::-1]


def leases_ran_out(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield blocks that the connector released unfetched at the end of their lease."""
    lines = [line for line in view.lines("lease_expired") if not number_of(line, "readers")]
    if not lines:
        return
    seconds = number_of(lines[0], "seconds")
    yield TextJudgement(
        code="leak.lease-burst",
        engine=view.engine,
        verdict="likely" if len(lines) > 1 else "cannot-tell",
        since_ns=lines[0].at_ns or 0,
        position=lines[0].position,
        evidence=(
            Evidence("expired_leases", view.reported.count("lease_expired"), "lines", "log"),
            *((Evidence("lease", seconds, "s", "log", lines[0].position),) if seconds else ()),
            *quotes(lines),
        ),
        explanation=(
            f"Blocks of {counted(len(lines), 'finished request')} were kept until their lease expired"
            + (f" after {seconds:,.0f} s" if seconds else "")
            + ", and no decode worker had fetched them: requests were aborted or rerouted between the two sides."
        ),
        do_now=("Find what cancels them: the router's time-out must exceed the time of a prefill.",),
        change=("A shorter VLLM_NIXL_ABORT_REQUEST_TIMEOUT (or kv_lease_duration) frees them earlier.",),
        wont_help=("More decode capacity, if the clients gave up.",),
        missing="" if len(lines) > 1 else "whether it is more than one client that disconnected",
    )


def stale_reads(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield fetches by a decode worker of blocks that the prefill side had released."""
    lines = view.lines("stale_read")
    if not lines:
        return
    yield TextJudgement(
        code="corrupt.stale-remote-read",
        engine=view.engine,
        verdict="likely",
        since_ns=lines[0].at_ns or 0,
        position=lines[0].position,
        evidence=(Evidence("reads", view.reported.count("stale_read"), "lines", "log"), *quotes(lines)),
        explanation=(
            "A decode worker read blocks of a request that this engine had released: their lease had ended, and by then"
            " they may hold another request's KV. The client gets status 200 and an answer that may be wrong."
        ),
        do_now=(
            "Treat answers from that time as suspect.",
            "Find what delays the read: a full decode side, or the network.",
        ),
        change=(
            "Give leases more time than a request may queue on the decode side (VLLM_NIXL_ABORT_REQUEST_TIMEOUT,"
            " kv_lease_duration), or use a release that renews them.",
        ),
        wont_help=("Retrying on the client: the status does not show the error.",),
        missing="whether the blocks had been reused by then: the event stream of a probe on the prefill side",
    )


def pins_kept(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield an outer tier in which every item is pinned."""
    states = [line for line in view.lines("tier_state") if number_of(line, "items")]
    full = [line for line in states if (number_of(line, "pinned") or 0) >= (number_of(line, "items") or 1)]
    stuck = view.lines("tier_has_no_candidates")
    if not full:
        return
    items = number_of(full[-1], "items") or 0
    yield TextJudgement(
        code="leak.external-pins",
        engine=view.engine,
        verdict="likely",
        since_ns=full[0].at_ns or 0,
        position=full[0].position,
        evidence=(
            Evidence("pinned_items", round(items), "items", "log", full[-1].position),
            Evidence("items", round(items), "items", "log", full[-1].position),
            *quotes([*stuck[:2], *full[:2]]),
        ),
        explanation=(
            f"All {items:,.0f} items of the tier are pinned, so nothing can be evicted and nothing new is stored. A"
            " pin lasts as long as a fetch: these are lookups whose fetch never started."
        ),
        do_now=("Restart the process that holds the tier: the pins go with it.",),
        change=("Upgrade the tier (LMCache) to a release that unpins after lookups without a fetch.",),
        wont_help=("A larger tier: it also fills, only later.",),
        missing="how old the pins are: the same line again some minutes later, with the same items",
    )


def outer_tier_full(view: WrittenView) -> Iterator[TextJudgement]:
    """Allocations in an outer tier fail, again and again."""
    lines = view.lines("tier_allocation_failed")
    if len(lines) < HELD_LINES:
        return
    yield TextJudgement(
        code="stuck.outer-tier",
        engine=view.engine,
        verdict="likely" if view.states("stuck", "waits_unserved", "slow") else "cannot-tell",
        since_ns=lines[0].at_ns or 0,
        position=lines[0].position,
        evidence=(
            Evidence("failed_allocations", view.reported.count("tier_allocation_failed"), "lines", "log"),
            *quotes(lines),
        ),
        explanation=(
            f"The outer tier could not allocate {view.reported.count('tier_allocation_failed'):,} times: its"
            f" buffer is full"
            " and the engine waits in it, whatever its own pool has free."
        ),
        do_now=("Check the tier's own state: what is pinned, and whether evictions happen.",),
        change=("Give the tier more memory than the requests in flight need (LMCACHE_MAX_LOCAL_CPU_SIZE).",),
        wont_help=("A larger KV pool on the device.",),
        missing="what fills it: the tier's state line, or the stacks of the engine (py-spy dump)",
    )


def outer_misses(view: WrittenView) -> Iterator[TextJudgement]:
    """Look-ups in an outer tier that stored before, none with a hit."""
    lookups, stored = view.lines("tier_lookup"), view.lines("tier_stored")
    hits = sum(number_of(line, "hits") or 0 for line in lookups)
    if len(lookups) < HELD_LINES or not stored or hits:
        return
    if not view.states("shared_prompts", "tier_misses", "prefix_misses"):
        return  # prompts that share nothing miss too
    yield TextJudgement(
        code="collapse.outer-hits",
        engine=view.engine,
        verdict="likely",
        since_ns=lookups[0].at_ns or 0,
        position=lookups[0].position,
        evidence=(
            Evidence("lookups", view.reported.count("tier_lookup"), "lines", "log"),
            Evidence("hit_tokens", 0, "tokens", "log"),
            *quotes([*lookups[:2], *stored[:2]]),
        ),
        explanation=(
            f"{counted(len(lookups), 'look-up')} in the outer tier missed although it stores KV, and the report says"
            " that prompts share a prefix: keys do not match, or chunks are larger than the shared prefix."
        ),
        do_now=("Send one prompt twice, seconds apart, and compare the two lookup lines.",),
        change=(
            "Make keys equal on all sides (same model name, tokenizer, chunk size, PYTHONHASHSEED), and the chunk"
            " smaller than the shared prefix.",
        ),
        wont_help=("A larger tier: lookups miss what is stored.",),
        missing="the keys of what is stored and looked up: the tier's debug log",
    )
