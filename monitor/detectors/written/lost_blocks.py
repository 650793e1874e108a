"""Lost blocks and blocks freed twice, as audits, connectors, outer tiers and the engine's assertions report them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ...base.text import counted, duration, percent
from ...contract.samples import ReportedEvent, Sample
from ..judgement import Evidence, TextJudgement
from ..leak.finished_held import FinishedHeld
from ..leak.lease_burst import READ_LATE
from ..runbook_files import runbook_advice
from ..sample_math import apart_s
from .written_view import WrittenView, number_of, quotes, seconds_between

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
    yield view.finding(
        "leak.unaccounted",
        line,
        evidence=(*_audit_numbers(line, unowned), *quotes([*lines[:2], *slots[:1]])),
        explanation=(
            f"{unowned:,.0f} of {number_of(line, 'total') or 0:,.0f} tokens have no owner: {_sum_of(line)}. The audit"
            " runs when nothing is running, so that no request can hold them."
            + (f" {counted(round(lost_slots), 'request slot')} is also missing." if lost_slots else "")
            + " A counter with the same error would look the same."
        ),
        do_now=("Restart the engine during a quiet time: only a restart frees the tokens.",),
        change=(
            "Find the request before the line: an abort, a retraction or a chunked prefill whose free was skipped. This"
            " is an engine bug: report it with these sums, and try another release.",
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
    yield view.finding(
        "corrupt.double-free",
        line,
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


def held_after_finish(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a pool that stays in use with nothing running, while a connector delays frees."""
    idle = _idle_end(view.samples, view.settings(FinishedHeld.idle_floor))
    delayed = view.lines("free_delayed")
    if len(idle) < HELD_LINES or not (delayed or view.mentioned("connector_named") or "kv_connector" in view.facts):
        return
    last = idle[-1]
    stands = view.states("stuck", "waits_unserved", "not_freed")
    if not stands:
        return  # a consumer may still fetch them
    usage = last.usage or 0.0
    held_s = seconds_between(idle[0], last, len(idle))
    yield view.finding(
        "leak.finished-held",
        idle[0],
        verdict="likely" if delayed else "cannot-tell",
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


def held_between_pages(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a full pool on the last metrics pages of a text, between which nothing ran and no token was counted."""
    least = view.settings(FinishedHeld.full_pool)
    held: list[Sample] = []
    for page in reversed(view.pages):
        starved = page.running == 0 and bool(page.waiting) and (page.usage or 0.0) >= least and page.awake is not False
        if not starved or (held and page.generation_tokens != held[-1].generation_tokens) or page.restarted:
            break
        held.append(page)
    lasted = apart_s(held[-1], held[0]) if len(held) >= HELD_LINES else None
    if lasted is None or lasted < view.settings(FinishedHeld.starved_s):
        return
    last, first = held[0], held[-1]
    deferred = last.deferred or 0
    yield view.finding(
        "leak.finished-held",
        first,
        verdict="cannot-tell" if deferred else "likely",
        evidence=(
            Evidence("usage_with_nothing_running", round(100 * (last.usage or 0), 1), "%", "metrics", last.position),
            Evidence("waiting", last.waiting or 0, "requests", "metrics", last.position),
            Evidence("generation_tokens", last.generation_tokens or 0, "tokens", "metrics", last.position),
            Evidence("held_for", round(lasted, 1), "s", "metrics", last.position),
        ),
        explanation=(
            f"On pages {duration(lasted)} apart {percent(last.usage or 0)} of the pool is in use with nothing running,"
            f" {counted(last.waiting or 0, 'request')} waiting, and no token was generated between them: no running"
            " request holds these blocks, and the waiting ones have no room to run."
            + (f" {deferred:,} of these wait for something else, and may hold the pool for it." if deferred else "")
        ),
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
    read_late = any(number_of(line, "late") != 0 for line in view.lines("stale_read", "transfer_counts"))
    yield view.finding(
        "leak.lease-burst",
        lines[0],
        verdict="likely" if len(lines) > 1 else "cannot-tell",
        severity=None if len(lines) > 1 else "info",
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
        change=runbook_advice("leak.lease-burst", READ_LATE if read_late else "")["change"],
        wont_help=("More decode capacity, if the clients gave up.",),
        missing="" if len(lines) > 1 else "whether it is more than one client that disconnected",
    )


PINNED_CHANGE: Final = ("Upgrade the tier (LMCache) to a release that unpins after lookups without a fetch.",)
PINNED_WONT_HELP: Final = ("A larger tier: it also fills, only later.",)


def pins_kept(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield an outer tier in which every item is pinned."""
    states = [line for line in view.lines("tier_state") if number_of(line, "items")]
    full = [line for line in states if (number_of(line, "pinned") or 0) >= (number_of(line, "items") or 1)]
    stuck = view.lines("tier_has_no_candidates")
    if not full:
        yield from _pins_expired(view)
        return
    items = number_of(full[-1], "items") or 0
    yield view.finding(
        "leak.external-pins",
        full[0],
        evidence=(
            Evidence("pinned_items", round(items), "items", "log", full[-1].position),
            Evidence("items", round(items), "items", "log", full[-1].position),
            *quotes([*stuck[:2], *full[:2]]),
        ),
        explanation=(
            f"All {items:,.0f} items of the tier are pinned, so nothing can be evicted and nothing new is stored. A pin"
            " lasts as long as a fetch: these are lookups whose fetch never started."
        ),
        do_now=("Restart the process that holds the tier: the pins go with it.",),
        change=PINNED_CHANGE,
        wont_help=PINNED_WONT_HELP,
        missing="how old the pins are: the same line again some minutes later, with the same items",
    )


def _pins_expired(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield pins that a tier ends by itself, because the fetch that was to end them never did."""
    expired = view.lines("pin_expired")
    if not expired:
        return
    counts = [number_of(line, "expired") or 0 for line in expired]
    told = round(max(sum(counts), sum(not count for count in counts)))
    seconds = max(number_of(line, "seconds") or 0 for line in expired)
    refused = view.lines("tier_refuses", "tier_allocation_failed", "tier_has_no_candidates")
    yield view.finding(
        "leak.external-pins",
        expired[0],
        evidence=(
            Evidence("expired_pins", told, "items", "log", expired[-1].position),
            Evidence("pinned_for", seconds, "s", "log", expired[0].position),
            *quotes([*expired[:2], *refused[:2]]),
        ),
        explanation=(
            f"The outer tier took the pins off {counted(told, 'item')}, up to {seconds:,.0f} s after they were set:"
            " whoever looked them up neither fetched them nor gave them up."
            + (" Until then nothing else fits, and the tier refuses to store more." if refused else "")
            + " A fetch that is slower than the time-out would look the same."
        ),
        do_now=("Find requests that were aborted or preempted between their lookup in the tier and their fetch.",),
        change=PINNED_CHANGE,
        wont_help=PINNED_WONT_HELP,
        missing="which request set the pins: the tier's log at DEBUG",
    )


_AFTER_CORRUPTION: Final = (
    "Restart the engine, and treat earlier answers as suspect: two requests may have shared a block.",
)
_NO_REMEDY: Final = ("More memory, or a larger pool.", "Removing the check: it reports the bug and does not cause it.")
_WHICH_REQUEST: Final = "which request freed the block, and when: the event stream of a probe"


def block_freed_twice(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a refusal of the block manager to free a block that no request holds."""
    lines = view.lines("freed_twice")
    if not lines:
        return
    yield view.finding(
        "corrupt.double-free",
        lines[0],
        evidence=quotes(lines),
        explanation=(
            "The block manager was to free a block whose reference count is 0 already. Two sequences shared it and one"
            " of them freed it once too often, or an aborted request was freed again. A count that was lost before"
            " looks the same."
        ),
        do_now=_AFTER_CORRUPTION,
        change=(
            "Disable features that share blocks within a request (beam search, n > 1, a sliding window, offloading)"
            " until you have a release with the fix.",
        ),
        wont_help=_NO_REMEDY,
        missing=_WHICH_REQUEST,
    )


def free_list_contradicts(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a failed assertion of the block pool: its list of free blocks and its counts disagree."""
    lines = view.lines("free_list_broken")
    if not lines:
        return
    condition = next((str(line.fields["condition"]) for line in lines if "condition" in line.fields), "")
    yield view.finding(
        "corrupt.counter-drift",
        lines[0],
        evidence=quotes(lines),
        explanation=(
            "A check of the block pool fails"
            + (f" ({condition})" if condition else "")
            + ": its list of free blocks, its counter and the blocks' references do not agree. A block that was freed"
            " twice (corrupt.double-free), or freed while another part of the engine still used it, leaves such a list."
        ),
        do_now=_AFTER_CORRUPTION,
        change=("Report it with the lines above it. Until it is fixed, run without block reuse or the connector.",),
        wont_help=_NO_REMEDY,
        missing=_WHICH_REQUEST,
    )
