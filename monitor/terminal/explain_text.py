"""`monitor explain` at a terminal: a request, a block, an event with what happened around it, a fall of usage, a memory
breakdown.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import msgspec
from rich.console import Console

from ..base.errors import NotKnown
from ..base.text import counted, listed, percent
from ..contract.kinds import Kind
from ..ledger.memory_breakdown import MemoryTerm
from ..ledger.pool_account import share_of_pool
from ..ledger.usage_drop import UsageDrop
from ..ledger.wait_graph import Wait
from ..planning.plan_types import GIB_BYTES
from ..questions.query import Query
from ..questions.schema import (
    PART_LABELS,
    BlockDetail,
    EngineView,
    EventHistoryEntry,
    EventView,
    PhaseView,
    RequestDetail,
)
from ..questions.windows import drop_in_words
from .memory_report import MemoryReport, Pool
from .terminal import WIDTH, clock, put_line, wrapped

POSITION: Final = re.compile(r"\d{1,20}/\d{1,15}/\d{1,9}")
"""The position of an event: the epoch of its engine, the batch, and the event within it."""
AROUND: Final = 9
_T = TypeVar("_T")
ALL_KINDS: Final = tuple(kind.name.lower() for kind in Kind)


class EventReport(msgspec.Struct, frozen=True):
    """An event. `around`: what happened before and after it, itself among them. Just after it: the engine's pool and
    queues, the request that it is about, if any, and the first of its blocks, if any.
    """

    engine: str
    event: EventView
    around: list[EventView]
    pool: EngineView
    request: RequestDetail | None
    block: BlockDetail | None


def event_at(query: Query, engines: Sequence[str], position: str) -> EventReport:
    """Return the event at this position in the stream of one of these engines. Raises NotKnown, and ValueError for what
    is not a position of an event.
    """
    if not POSITION.fullmatch(position):
        raise ValueError(
            f"{position!r} is not a position of an event: give epoch/sequence/event, as evidence has it (--format json)"
        )
    return first_known(engines, lambda engine: _report(query, engine, position))


def first_known(engines: Sequence[str], ask: Callable[[str], _T]) -> _T:
    """Return the answer about the first engine that has one. Raises the NotKnown of the last if none has."""
    for engine in engines[:-1]:
        with suppress(NotKnown):
            return ask(engine)
    return ask(engines[-1])


def _report(query: Query, engine: str, position: str) -> EventReport:
    found = query.events(engine, around=position, limit=1, kinds=ALL_KINDS)
    if not found or found[0].position != position:
        raise NotKnown(f"the stream of {engine} has no event {position} in the part that is kept")
    event = found[0]
    around = {one.position: one for one in (*query.events(engine, around=position, limit=AROUND), event)}
    pool = next(view for view in query.engines(at=position) if view.engine == engine)
    return EventReport(
        engine=engine,
        event=event,
        around=sorted(around.values(), key=lambda one: [*map(int, one.position.split("/"))]),
        pool=pool,
        request=_request(query, event, engine),
        block=query.block(engine, event.blocks[0], at=position) if event.blocks else None,
    )


def _request(query: Query, event: EventView, engine: str) -> RequestDetail | None:
    """Return the request that it is about, or None where the ledger no longer has one of that name."""
    if not event.request:
        return None
    try:
        return query.request(engine, event.request, at=event.position)
    except NotKnown:
        return None


MOST_PREEMPTED: Final = 8
QUEUED: Final = ("RECEIVED", "WAITING", "PREEMPTED")


def request(detail: RequestDetail, console: Console) -> None:
    """Print `monitor explain request`: its state and its phases."""
    put_line(console, f"REQUEST {detail.request.id} on {detail.engine}", "bold")
    _state(detail, console)
    console.print()
    if detail.waits is not None:
        put_line(console, "WAITS FOR (by the number of blocks that would become free)", "bold")
        _wait(detail.waits, console, "  ", "  ")
        console.print()
    put_line(console, "PHASES", "bold")
    _print_phases(detail.phases, console)
    console.print()
    put_line(console, "CONDITIONS", "bold")
    for condition in detail.conditions:
        holds = "yes" if condition.holds else "no"
        lead = f"  {condition.name:<12} {holds:<3} {clock(condition.since) if condition.since else '-':<9} "
        wrapped(console, condition.reason, lead if condition.reason else lead.rstrip())
    console.print()
    _print_history(detail.event_history, console, whole=detail.event_history_complete)


def block(detail: BlockDetail, console: Console) -> None:
    """Print `monitor explain block`: its state, its owners, and its event history."""
    put_line(console, f"BLOCK {detail.block} on {detail.engine}", "bold")
    _held(detail, console)
    console.print()
    put_line(console, "OWNERSHIP CHAIN", "bold")
    _because(detail, console)
    console.print()
    _print_history(detail.event_history, console, whole=True)


def event(explained: EventReport, console: Console) -> None:
    """`monitor explain event`: the event, its neighbours, and the pool, the request and the block just after it."""
    one, pool = explained.event, explained.pool
    put_line(console, f"EVENT {one.position} on {explained.engine}", "bold")
    wrapped(console, f"{clock(one.at, precise=True)} UTC, {_in_words(one)}", "  ")
    console.print()
    put_line(console, "AROUND IT", "bold")
    for other in explained.around:
        sequence = other.position.partition("/")[2]
        mark = "▸" if other.position == one.position else " "
        wrapped(console, _in_words(other), f"{mark} {sequence:<9} {clock(other.at, precise=True):<12}  ")
    console.print()
    put_line(console, "JUST AFTER IT", "bold")
    wrapped(console, f"{_count(pool.running)} running, {_count(pool.waiting)} waiting", f"  {'queues':<8}")
    if (balance := pool.balance) is not None:
        used = balance.running + balance.waiting + balance.finished + balance.unaccounted
        parts = [
            f"{held:,} {name}"
            for name, held in (
                ("running", balance.running),
                ("waiting", balance.waiting),
                (PART_LABELS["finished"], balance.finished),
                ("UNACCOUNTED", balance.unaccounted),
            )
            if held
        ]
        free = f"{balance.free:,} free, {balance.cached_idle:,} cached-idle"
        by = f" ({', '.join(parts)})" if parts else ""
        wrapped(console, f"{counted(used, 'block')} in use{by}, {free}", f"  {'pool':<8}")
    if explained.request is not None:
        console.print()
        put_line(console, f"  REQUEST {explained.request.request.id}", "bold")
        _state(explained.request, console)
    if explained.block is not None:
        console.print()
        of_several = f", the first of {one.block_count:,}" if one.block_count > 1 else ""
        put_line(console, f"  BLOCK {explained.block.block}{of_several}", "bold")
        _held(explained.block, console)
        _because(explained.block, console)


def drop(explained: UsageDrop, console: Console) -> None:
    """Print `monitor explain drop`: which blocks became free and why, the preemptions, and the work of the steps."""
    put_line(console, f"DROP on {explained.engine}", "bold")
    wrapped(console, f"{clock(explained.since, precise=True)} to {clock(explained.until, precise=True)} UTC", "  ")
    if not explained.is_complete:
        wrapped(console, "Events of this window, or from before it, are no longer stored.", "  ! ", "bold yellow")
    console.print()
    wrapped(console, drop_in_words(explained), "  ")
    console.print()
    put_line(console, "BLOCKS", "bold")
    put_line(console, _sum_line("used before", explained.used_before, explained.usable))
    for freed in explained.freed:
        left = (
            f", {counted(freed.references_released, 'reference')} left shared blocks"
            if freed.references_released
            else ""
        )
        wrapped(console, f"{listed(freed.requests)}{left}", f"  - {freed.reason:<18}{freed.blocks:>10,}  by ")
    if explained.allocated:
        wrapped(console, listed(explained.allocated_to), f"  + {'taken':<18}{explained.allocated:>10,}  by ")
    put_line(console, _sum_line("used after", explained.used_after, explained.usable))
    if explained.unexplained_blocks:
        wrapped(
            console, f"The sum is off by {explained.unexplained_blocks:,} blocks: events were lost.", "  ! ", "bold red"
        )
    console.print()
    put_line(console, "REQUESTS", "bold")
    for name, before, after in (
        ("running", explained.running_before, explained.running_after),
        ("waiting", explained.waiting_before, explained.waiting_after),
    ):
        put_line(console, f"  {name:<20}{_shown_figure(before)} → {_shown_figure(after).strip()}")
    for name, count in (
        ("admitted", explained.admitted),
        ("finished", explained.finished),
        ("preempted", explained.preemptions),
        ("allocations failed", explained.allocation_failures),
    ):
        put_line(console, f"  {name:<20}{count:>10,}")
    for one in explained.preempted[:MOST_PREEMPTED]:
        to = f" for {one.beneficiary}" if one.beneficiary not in ("", one.victim) else ""
        lost = f"{counted(one.blocks, 'block')}, {counted(one.tokens_lost, 'token')} to recompute"
        wrapped(console, f"{one.victim}{to} ({one.reason}): {lost}", "    ")
    if explained.preemptions > MOST_PREEMPTED:
        put_line(console, f"    and {explained.preemptions - MOST_PREEMPTED:,} more")
    console.print()
    put_line(console, "STEPS", "bold")
    put_line(console, f"  {'':<20}{'before':>10}{'in it':>10}", "dim")
    work, earlier = explained.work, explained.work_before
    rows: list[tuple[str, float, float]] = [
        ("seconds", work.seconds, earlier.seconds),
        ("steps", work.steps, earlier.steps),
        ("tokens computed", work.computed_tokens, earlier.computed_tokens),
        ("tokens generated", work.output_tokens, earlier.output_tokens),
        ("longest without, s", work.longest_without_step_s, earlier.longest_without_step_s),
    ]
    limits = sorted(earlier.limits.keys() | work.limits.keys())
    rows += [(f"bound by {limit}", work.limits.get(limit, 0), earlier.limits.get(limit, 0)) for limit in limits]
    for name, figure, then in rows:
        put_line(console, f"  {name:<20}{then:>10,}{figure:>10,}")


def memory(report: MemoryReport, console: Console) -> None:
    """`monitor explain memory`: the bill, what it leaves for KV, and how large the pool is."""
    put_line(console, f"MEMORY  {report.source}", "bold")
    for engine, figures in report.engines.items():
        put_line(console, f"  {engine}")
        device = report.devices[engine]
        for name, size in device.items():
            put_line(console, f"    {name:<24} {_gib(size)}")
        if device:
            put_line(console, f"    {'device in all':<24} {_gib(sum(device.values()))}", "bold")
        put_line(console, "  as the engine measured it", "dim")
        for name, size in figures.items():
            put_line(console, f"    {name.replace('_', ' '):<24} {_gib(size)}")
        console.print()
        _why_it_does_not_fall(report.pools[engine], console)
    for name, size in report.parts.items():
        put_line(console, f"  {name:<24} {_gib(size)}", "bold red" if size < 0 else "")
    if report.breakdown is not None:
        put_line(console, f"  {'device in all':<24} {_gib(report.breakdown.device_total)}", "bold")
        put_line(console, f"  {'requested of it':<24} {_gib(report.breakdown.requested)}")
    if report.over_requested_bytes is not None and report.over_requested_bytes > 0:
        over = f"The engine, its KV included, takes {_gib(report.over_requested_bytes).strip()} more than it was given."
        wrapped(console, over, "  ! ", "bold red")
    show_terms(report.terms, console)
    show_accounting(report.graphs_counted, report.contradictions, console)
    if report.suggestions is not None:
        console.print()
        put_line(console, "SUGGESTIONS", "bold")
        for name, words in (
            ("fit_requested", "to fit into the requested share"),
            ("use_all", "to use all of the device"),
        ):
            advised: int = getattr(report.suggestions, f"{name}_bytes")
            short: int = getattr(report.suggestions, f"{name}_short_by_bytes")
            printed = report.printed_suggestions.get(f"{name}_bytes")
            advice = f"cannot be met: {_gib(short).strip()} are missing" if short else f"--kv-cache-memory={advised}"
            put_line(console, f"  {words:<32} {advice}")
            if printed is not None:
                put_line(console, f"  {'':<32} (the engine's own: {printed})")
    if report.sizing:
        console.print()
        put_line(console, "POOL", "bold")
        for fact, value in report.sizing.items():
            put_line(console, f"  {fact:<24} {value:,}" if isinstance(value, int) else f"  {fact:<24} {value}")
    if report.breakdown is not None and report.breakdown.kv_cache is not None:
        console.print()
        _why_it_does_not_fall(Pool(report.breakdown.kv_cache, 0, 0, None), console)
    for note in report.notes:
        wrapped(console, f"Note: {note}.", "  ")


# -------------------------------------------------------------------- parts


def _state(detail: RequestDetail, console: Console) -> None:
    """Print the state of a request, its blocks, and its cost."""
    r = detail.request
    blocks = counted(r.blocks, "block") if r.blocks else "none"
    if r.shared_blocks:
        blocks += f", {r.shared_blocks:,} of them shared"
    room = f", with room for {counted(detail.unused_tokens, 'more token')}" if detail.unused_tokens else ""
    rows = [
        ("state", f"{r.state}{f' ({r.reason})' if r.reason else ''} since {clock(r.since)}, {r.for_s:.1f} s"),
        *([("stalled", "the engine's own watchdog reports no progress")] if r.stalled else []),
        ("blocks", f"{blocks}{' (free deferred)' if r.deferred else ''}{room}"),
        ("tokens", f"{r.prompt_tokens:,} of prompt, {r.computed_tokens:,} computed, {r.output_tokens:,} generated"),
        ("prefix", f"{counted(r.hit_tokens, 'token')} came from the prefix cache"),
        ("waited", ", ".join(f"{s:.2f} s {cause}" for cause, s in detail.waited_s.items()) or "not at all"),
        ("cost", f"{counted(r.preemptions, 'preemption')}, {counted(r.tokens_lost, 'token')} recomputed"),
    ]
    for name, text in rows:
        wrapped(console, text, f"  {name:<8}")


def _held(detail: BlockDetail, console: Console) -> None:
    hashed = "in the prefix cache" if detail.hashed else "not in the prefix cache"
    wrapped(console, f"{detail.state}, {counted(detail.references, 'reference')}, {hashed}", "  ")


def _because(detail: BlockDetail, console: Console) -> None:
    for chain in detail.ownership_chains:
        for depth, link in enumerate(chain):
            wrapped(console, link, "  " + ("   " * (depth - 1) + "← " if depth else ""))


def _in_words(one: EventView) -> str:
    return f"{one.kind}{f' {one.request}' if one.request else ''}: {one.text}"


def _count(number: int | None) -> str:
    return "not said" if number is None else f"{number:,}"


def _why_it_does_not_fall(pool: Pool, console: Console) -> None:
    """Answer the frequent question about the process's memory."""
    put_line(console, "WHY THE PROCESS'S MEMORY DOES NOT FALL", "bold")
    size = f" of {_gib(pool.bytes).strip()}" if pool.bytes is not None else ""
    blocks = f", {pool.usable_blocks:,} blocks of {pool.block_size} tokens," if pool.usable_blocks else ""
    wrapped(
        console,
        f"The engine allocates one KV pool{size}{blocks} at startup and keeps it until it exits. It allocates and"
        " frees blocks within that pool, so the process and the device use the same memory whether the pool is full"
        " or empty. This is not a leak.",
        "  ",
    )
    if pool.usage is not None:
        wrapped(console, f"Pool usage now: {percent(pool.usage)}. Only this falls when requests end.", "  ")


def _wait(wait: Wait, console: Console, lead: str, below: str) -> None:
    """Print a tree: `lead` stands before its first line, `below` before all under that."""
    come_back = f"{counted(wait.blocks, 'block')}: " if wait.blocks and lead != below else ""
    rest = "│ " if wait.waits_for else "  "
    lines = textwrap.wrap(come_back + wait.text, WIDTH - len(lead) - 2, break_long_words=False, break_on_hyphens=False)
    for index, line in enumerate(lines):
        put_line(console, f"{lead}{line}" if index == 0 else f"{below}{rest}{line}")
    for index, cause in enumerate(wait.waits_for):
        last = index == len(wait.waits_for) - 1
        _wait(cause, console, f"{below}{'└ ' if last else '├ '}", f"{below}{'  ' if last else '│ '}")


def _print_phases(phases: Sequence[PhaseView], console: Console) -> None:
    """Print a line for each phase. A long reason stands on a line of its own."""
    if not phases:
        put_line(console, "  No event about it is stored.")
        return
    put_line(console, f"  {'since':<12} {'state, reason':<30}{'for':>9}{'blocks':>7}{'tokens':>8}  cost", "dim")
    for phase in phases:
        name = f"{phase.state} {phase.reason}".strip().replace("PREEMPTED PREEMPTED", "PREEMPTED")
        lead = f"  {clock(phase.since, precise=True):<12} "
        if len(name) > 30:
            put_line(console, f"{lead}{name}")
            lead, name = " " * len(lead), ""
        tokens = phase.computed_tokens
        line = f"{lead}{name:<30}{phase.for_s:>8.2f}s{phase.blocks:>7,}{tokens:>8,}  {_cost(phase)}"
        put_line(console, line.rstrip())


def _cost(phase: PhaseView) -> str:
    if phase.recomputed_tokens:
        return f"again {phase.recomputed_tokens:,}"
    return f"+{phase.phase_tokens:,}" if phase.phase_tokens else "queued" if phase.state in QUEUED else ""


def _print_history(history: Sequence[EventHistoryEntry], console: Console, whole: bool) -> None:
    put_line(console, "HISTORY" if whole else "HISTORY (its beginning is no longer stored)", "bold")
    if not history:
        put_line(console, "  No event about it is stored.")
    for line in history:
        wrapped(console, line.text, f"  {clock(line.at, precise=True):<13} ")


def _sum_line(name: str, blocks: int | None, usable: int) -> str:
    share = share_of_pool(blocks, usable) if blocks is not None else None
    shown = f"{percent(share):>9}" if share is not None else ""
    return f"  {name:<20}{_shown_figure(blocks)}{shown}"


def _shown_figure(count: int | None) -> str:
    return f"{'not said' if count is None else f'{count:,}':>10}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):>10.3f} GiB"


def show_terms(terms: list[MemoryTerm], console: Console) -> None:
    """Print a line for each term of a breakdown that is not whole."""
    if not terms:
        return
    put_line(console, "BREAKDOWN, as far as the text states it", "bold")
    for term in terms:
        put_line(console, f"  {term.name:<24} {_term_size(term):<28} {term.state}")


def show_accounting(graphs_counted: str, contradictions: list[str], console: Console) -> None:
    """Print how graphs are counted, and the engine's sizes that contradict each other."""
    if graphs_counted:
        wrapped(console, f"Graphs: {graphs_counted}.", "  ")
    for one in contradictions:
        wrapped(console, f"{one[0].upper()}{one[1:]}.", "  ! ", "bold red")


def _term_size(term: MemoryTerm) -> str:
    if term.state == "stated":
        return f"{(term.low + (term.high or term.low)) / 2 / GIB_BYTES:>8.2f} GiB"
    if term.high is None:
        return f"at least {term.low / GIB_BYTES:.2f} GiB" if term.low else "not bounded"
    if term.state == "follows":
        return f"{(term.low + term.high) / 2 / GIB_BYTES:>8.2f} GiB"
    return f"{term.low / GIB_BYTES:.2f} to {term.high / GIB_BYTES:.2f} GiB"
