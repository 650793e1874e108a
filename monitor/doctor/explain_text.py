"""Formats `monitor explain`: a request, a block, an event, a fall of usage, a memory breakdown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from rich.console import Console

from kvscope.monitor.analysis.usage_drop import UsageDrop
from kvscope.monitor.analysis.wait_tree import Wait
from kvscope.monitor.doctor.breakdown_text import show_accounting, show_terms
from kvscope.monitor.doctor.event_report import EventReport
from kvscope.monitor.doctor.memory_report import MemoryReport, Pool
from kvscope.monitor.doctor.terminal import WIDTH, clock, put_line, wrapped
from kvscope.monitor.queries.window_explanation import drop_in_words
from kvscope.monitor.schema import BlockDetail, EventHistoryEntry, EventView, PhaseView, RequestDetail
from kvscope.monitor.text import counted, listed, percent

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
                ("finished, held", balance.finished),
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
    rows = [
        ("state", f"{r.state}{f' ({r.reason})' if r.reason else ''} since {clock(r.since)}, {r.for_s:.1f} s"),
        *([("stalled", "the engine's own watchdog reports no progress")] if r.stalled else []),
        ("blocks", f"{_blocks(r.blocks)}{' (free deferred)' if r.deferred else ''}{_unused(detail)}"),
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


def _blocks(count: int) -> str:
    return counted(count, "block") if count else "none"


def _unused(detail: RequestDetail) -> str:
    return f", with room for {counted(detail.unused_tokens, 'more token')}" if detail.unused_tokens else ""


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
    share = f"{percent(blocks / usable):>9}" if blocks is not None and usable else ""
    return f"  {name:<20}{_shown_figure(blocks)}{share}"


def _shown_figure(count: int | None) -> str:
    return f"{'not said' if count is None else f'{count:,}':>10}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):>10.3f} GiB"
