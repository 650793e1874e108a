"""The doctor's report for a person: a table of 80 columns that is good in black and white, one line each, Markdown."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from monitor.detectors.judgement import SEVERITIES, Evidence
from monitor.doctor.memory import MemoryReport
from monitor.doctor.report import BalanceReport, Report, TargetReport
from monitor.findings import FindingReport
from monitor.ledger.drops import Drop
from monitor.ledger.waits import Wait
from monitor.ledger.words import counted, duration, listed, percent
from monitor.views import BlockDetail, PhaseView, RequestDetail, StoryView

WIDTH = 80
SIGNS = {"info": "·", "warning": "‼", "error": "×", "critical": "×"}
STYLES = {"info": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}
HOLDERS = ("running", "waiting", "finished", "cached_idle", "free", "reserved", "unaccounted")
LABELS = {"cached_idle": "cached-idle", "unaccounted": "UNACCOUNTED", "finished": "finished, held"}
BAR = 34
MOST_PREEMPTED = 8
_QUEUED = ("RECEIVED", "WAITING", "PREEMPTED")
NOT_EXPOSED = "not exposed"


def table(report: Report, console: Console) -> None:
    """Everything, in 80 columns."""
    for target in report.targets:
        if target.status != "ok":
            _print(console, f"? {target.target}", "bold")
            _wrapped(console, target.error, "  ")
            console.print()
        for balance in report.balances:
            if balance.target == target.target:
                _balance(balance, target, console)
        for note in target.notes:
            _wrapped(console, f"Note: {note}.", "  ")
            console.print()
    _print(console, f"FINDINGS  {_tally(report.findings)}", "bold")
    console.print()
    for finding in report.findings:
        _finding(finding, console)
    if not report.findings:
        looked = [target for target in report.targets if target.status == "ok"]
        seen = "Nothing is wrong as far as can be seen." if looked else "Nothing could be looked at."
        _print(console, f"  {seen}")


def short(report: Report, console: Console) -> None:
    """One line for each target that could not be looked at, and for each finding."""
    for target in report.targets:
        if target.status != "ok":
            _print(console, f"{target.status} {target.target}: {target.error}")
    for balance in report.balances:
        if balance.faults:
            _print(console, f"note {balance.engine}: {_faults(balance)}")
    for finding in report.findings:
        culprits = _culprits(finding)
        _print(
            console,
            f"{finding.severity} {finding.verdict} {finding.code} {finding.engine}"
            f"{' [' + culprits + ']' if culprits else ''}: {_first_sentence(finding.explanation)}",
        )


def markdown(report: Report, console: Console) -> None:
    """For a ticket or a chat."""
    out = ["# kvscope doctor", ""]
    for target in report.targets:
        if target.status != "ok":
            out += [f"**{target.target}**: {target.error}", ""]
        out += [f"Note: {note}.\n" for note in target.notes]
    for balance in report.balances:
        out += [f"## {balance.engine}", "", _headline(balance), ""]
        if balance.faults:
            out += [f"**{_faults(balance)}**", ""]
        if balance.total is not None:
            out += ["| holder | blocks |", "|---|---:|"]
            out += [f"| {LABELS.get(h, h)} | {getattr(balance, h):,} |" for h in HOLDERS]
            out += [f"| **total** | {balance.total:,} |", ""]
    out += ["## Findings", "", _tally(report.findings), ""]
    for finding in report.findings:
        out += [f"### {finding.severity}: {finding.code} ({finding.verdict})", "", finding.explanation, ""]
        if culprits := _culprits(finding):
            out += [f"- Culprits: {culprits}"]
        out += [f"- Since: {_since(finding)}", f"- Evidence: {_evidence(finding.evidence)}"]
        out += [f"- Effect: {effect}" for effect in _effects(finding)]
        for name, items in (("Do now", finding.do_now), ("Change", finding.change), ("Won't help", finding.wont_help)):
            out += [f"- {name}: {item}" for item in items]
        if finding.missing:
            out += [f"- To be sure: {finding.missing}"]
        out += [f"- Runbook: {finding.runbook}", ""]
    for line in out:
        _print(console, line)


def request(detail: RequestDetail, console: Console) -> None:
    """`monitor explain request`: what it is, and its life."""
    r = detail.request
    _print(console, f"REQUEST {r.id} on {detail.engine}", "bold")
    rows = [
        ("state", f"{r.state}{f' ({r.reason})' if r.reason else ''} since {_time(r.since)}, {r.for_s:.1f} s"),
        *([("stalled", "the engine's own watchdog says that it does not move")] if r.stalled else []),
        ("blocks", f"{counted(r.blocks, 'block')}{' (free deferred)' if r.deferred else ''}{_unused(detail)}"),
        ("tokens", f"{r.prompt_tokens:,} of prompt, {r.computed_tokens:,} computed, {r.output_tokens:,} generated"),
        ("prefix", f"{counted(r.hit_tokens, 'token')} came from the prefix cache"),
        ("waited", ", ".join(f"{s:.2f} s {cause}" for cause, s in detail.waited_s.items()) or "not at all"),
        ("cost", f"{counted(r.preemptions, 'preemption')}, {counted(r.tokens_lost, 'token')} computed again"),
    ]
    for name, text in rows:
        _wrapped(console, text, f"  {name:<8}")
    console.print()
    if detail.waits is not None:
        _print(console, "WAITS FOR (the blocks that would come back, the most first)", "bold")
        _wait(detail.waits, console, "  ", "  ")
        console.print()
    _print(console, "LIFE", "bold")
    _life(detail.life, console)
    console.print()
    _print(console, "CONDITIONS", "bold")
    for condition in detail.conditions:
        holds = "yes" if condition.holds else "no"
        lead = f"  {condition.name:<12} {holds:<3} {_time(condition.since) if condition.since else '-':<9} "
        _wrapped(console, condition.why, lead if condition.why else lead.rstrip())
    console.print()
    _story(detail.story, console, whole=detail.story_is_whole)


def block(detail: BlockDetail, console: Console) -> None:
    """`monitor explain block`: what it is, why, and its life."""
    _print(console, f"BLOCK {detail.block} on {detail.engine}", "bold")
    hashed = "in the prefix cache" if detail.hashed else "not in the prefix cache"
    _wrapped(console, f"{detail.state}, {counted(detail.references, 'reference')}, {hashed}", "  ")
    console.print()
    _print(console, "BECAUSE", "bold")
    for chain in detail.because:
        for depth, link in enumerate(chain):
            _wrapped(console, link, "  " + ("   " * (depth - 1) + "← " if depth else ""))
    console.print()
    _story(detail.story, console, whole=True)


def drop(told: Drop, console: Console) -> None:
    """`monitor explain drop`: what became free and why, who was preempted for whom, and what the steps did."""
    _print(console, f"DROP on {told.engine}", "bold")
    _wrapped(console, f"{_time(told.since, precise=True)} to {_time(told.until, precise=True)} UTC", "  ")
    if not told.is_whole:
        _wrapped(console, "Events of this window, or from before it, are no longer kept.", "  ! ", "bold yellow")
    console.print()
    _wrapped(console, _what_happened(told), "  ")
    console.print()
    _print(console, "BLOCKS", "bold")
    _print(console, _sum_line("used before", told.used_before, told.usable))
    for freed in told.freed:
        left = f", {counted(freed.references_left, 'reference')} left shared blocks" if freed.references_left else ""
        _wrapped(console, f"{listed(freed.requests)}{left}", f"  - {freed.reason:<18}{freed.blocks:>10,}  by ")
    if told.taken:
        _wrapped(console, listed(told.taken_by), f"  + {'taken':<18}{told.taken:>10,}  by ")
    _print(console, _sum_line("used after", told.used_after, told.usable))
    if told.off_by:
        _wrapped(console, f"The sum is off by {told.off_by:,} blocks: events were lost.", "  ! ", "bold red")
    console.print()
    _print(console, "REQUESTS", "bold")
    for name, before, after in (
        ("running", told.running_before, told.running_after),
        ("waiting", told.waiting_before, told.waiting_after),
    ):
        _print(console, f"  {name:<20}{_figure(before)} → {_figure(after).strip()}")
    for name, count in (
        ("admitted", told.admitted), ("finished", told.finished), ("preempted", told.preemptions),
        ("allocations failed", told.allocation_failures),
    ):  # fmt: skip
        _print(console, f"  {name:<20}{count:>10,}")
    for one in told.preempted[:MOST_PREEMPTED]:
        to = f" for {one.beneficiary}" if one.beneficiary not in ("", one.victim) else ""
        lost = f"{counted(one.blocks, 'block')}, {counted(one.tokens_lost, 'token')} to compute again"
        _wrapped(console, f"{one.victim}{to} ({one.reason}): {lost}", "    ")
    if told.preemptions > MOST_PREEMPTED:
        _print(console, f"    and {told.preemptions - MOST_PREEMPTED:,} more")
    console.print()
    _print(console, "STEPS", "bold")
    _print(console, f"  {'':<20}{'before':>10}{'in it':>10}", "dim")
    work, earlier = told.work, told.work_before
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
        _print(console, f"  {name:<20}{then:>10,}{figure:>10,}")


def _what_happened(told: Drop) -> str:
    """In a sentence or two, by the figures below it."""
    said = "Nothing is known of what was used then."
    if told.highest is not None and told.lowest is not None:
        top, bottom = (f"{percent(level.used / told.usable)} of the pool" for level in (told.highest, told.lowest))
        said = f"Usage did not fall: {bottom} at the end."
        if told.lowest.used < told.highest.used:
            top_at, bottom_at = (_time(level.at, precise=True) for level in (told.highest, told.lowest))
            freed = sum(told.freed_in_fall.values())
            by = " and ".join(f"{blocks:,} as {reason}" for reason, blocks in told.freed_in_fall.items() if blocks)
            said = (
                f"Usage fell from {top} at {top_at} to {bottom} at {bottom_at}: {counted(freed, 'block')} became free,"
                f" {by}. In the whole window:"
                f" {counted(told.preemptions, 'preemption') if told.preemptions else 'nobody was preempted'}."
            )
    work, before = told.work, told.work_before
    if work.output_tokens < before.output_tokens / 2 and before.output_tokens:
        said += f" {counted(work.output_tokens, 'token')} were generated, {before.output_tokens:,} in as long before:"
        if work.longest_without_step_s > work.seconds / 2:
            said += f" no step ended for {duration(work.longest_without_step_s)}."
        elif not told.running_after:
            said += " nothing runs any more."
        elif work.computed_tokens > 2 * work.output_tokens:
            said += f" the steps computed {counted(work.computed_tokens, 'token')}, most of them of prompts."
        else:
            said += " fewer run."
    return said


def _sum_line(name: str, blocks: int | None, usable: int) -> str:
    share = f"{percent(blocks / usable):>9}" if blocks is not None and usable else ""
    return f"  {name:<20}{_figure(blocks)}{share}"


def _figure(count: int | None) -> str:
    return f"{'not said' if count is None else f'{count:,}':>10}"


# -------------------------------------------------------------------- parts


def memory(report: MemoryReport, console: Console) -> None:
    """`monitor explain memory`: the bill, what it leaves for KV, and how large the pool is."""
    _print(console, f"MEMORY  {report.source}", "bold")
    for engine, figures in report.engines.items():
        _print(console, f"  {engine}")
        for name, size in figures.items():
            _print(console, f"    {name.replace('_', ' '):<24} {_gib(size)}")
    for name, size in report.parts.items():
        _print(console, f"  {name:<24} {_gib(size)}", "bold red" if size < 0 else "")
    if report.bill is not None:
        _print(console, f"  {'device in all':<24} {_gib(report.bill.device_total)}", "bold")
        _print(console, f"  {'requested of it':<24} {_gib(report.bill.requested)}")
    if report.over_requested_bytes is not None and report.over_requested_bytes > 0:
        over = f"The engine, its KV included, takes {_gib(report.over_requested_bytes).strip()} more than it was given."
        _wrapped(console, over, "  ! ", "bold red")
    if report.suggestions is not None:
        console.print()
        _print(console, "SUGGESTIONS", "bold")
        for name, words in (
            ("fit_requested", "to fit into the requested share"),
            ("use_all", "to use all of the device"),
        ):
            advised: int = getattr(report.suggestions, f"{name}_bytes")
            short: int = getattr(report.suggestions, f"{name}_short_by_bytes")
            said = report.printed.get(f"{name}_bytes")
            advice = f"cannot be met: {_gib(short).strip()} are missing" if short else f"--kv-cache-memory={advised}"
            _print(console, f"  {words:<32} {advice}")
            if said is not None:
                _print(console, f"  {'':<32} (the engine's own: {said})")
    if report.sizing:
        console.print()
        _print(console, "POOL", "bold")
        for fact, value in report.sizing.items():
            _print(console, f"  {fact:<24} {value:,}" if isinstance(value, int) else f"  {fact:<24} {value}")
    for note in report.notes:
        _wrapped(console, f"Note: {note}.", "  ")


def _gib(size: int) -> str:
    return f"{size / (1 << 30):>10.3f} GiB"


def _balance(balance: BalanceReport, target: TargetReport, console: Console) -> None:
    _print(console, f"ENGINE {balance.engine}", "bold")
    _wrapped(console, f"{target.kind} {balance.target}", "  ")
    _wrapped(console, _headline(balance), "  ")
    if balance.faults:
        _wrapped(console, _faults(balance), "  ! ", "bold yellow")
    if balance.uncertain_since:
        _wrapped(console, f"Events were lost: figures since {_time(balance.uncertain_since)} may be wrong", "  ! ")
    console.print()
    if balance.total is None:
        usage = NOT_EXPOSED if balance.usage is None else percent(balance.usage)
        _print(console, f"  usage           {usage}")
        _wrapped(console, "which request holds which block is not exposed by this target", "  by holder       ")
        console.print()
        return
    for holder in HOLDERS:
        count = getattr(balance, holder)
        style = "bold red" if holder == "unaccounted" and count else ""
        label = LABELS.get(holder, holder)
        figures = f"{count:>10,}  {_share(count, balance.total)}"
        _print(console, f"  {label:<15} {_bar(count, balance.total)} {figures}".rstrip(), style)
    _print(console, f"  {'total':<15} {'':<{BAR}} {balance.total:>10,}")
    if balance.unexplained_references:
        extra = counted(balance.unexplained_references, "reference")
        _wrapped(console, f"{extra} explained by no living request and no announced deferral", "  ! ", "bold red")
    console.print()


def _faults(balance: BalanceReport) -> str:
    return f"Faults were switched on by hand: {', '.join(balance.faults)}"


def _headline(balance: BalanceReport) -> str:
    parts = [balance.status]
    if balance.running_requests is not None:
        reasons = ", ".join(f"{reason} {count}" for reason, count in balance.waiting_by_reason.items())
        waiting = f"{balance.waiting_requests} waiting" + (f" ({reasons})" if reasons else "")
        parts.append(f"{balance.running_requests} running, {waiting}")
    if block_size := balance.configuration.get("block_size"):
        parts.append(f"blocks of {block_size} tokens")
    if balance.step is not None and balance.step >= 0:
        parts.append(f"step {balance.step:,}")
    if balance.at:
        parts.append(f"at {_time(balance.at)}")
    return " · ".join(parts)


def _finding(finding: FindingReport, console: Console) -> None:
    resolved = f", resolved {_time(finding.resolved_at)}" if finding.resolved_at else ""
    head = f"{SIGNS[finding.severity]} {finding.severity}  {finding.code}  {finding.verdict}{resolved}"
    _print(console, head, STYLES[finding.severity])
    _wrapped(console, finding.explanation, "  ")
    rows: list[tuple[str, Iterable[str]]] = [
        ("Engine", [finding.engine]),
        # What is merely so, and not since some moment, needs no line about it.
        ("Since", [_since(finding)] if finding.since or finding.severity != "info" else []),
        ("Culprits", [_culprits(finding)]),
        ("Evidence", [_evidence(finding.evidence)]),
        ("Effects", _effects(finding)),
        ("Do now", finding.do_now),
        ("Change", finding.change),
        ("Won't help", finding.wont_help),
        ("To be sure", [finding.missing]),
        ("Runbook", [finding.runbook]),
    ]
    for name, texts in rows:
        for index, text in enumerate(filter(None, texts)):
            _wrapped(console, text, f"  {name if index == 0 else '':<11}")
    console.print()


def _unused(detail: RequestDetail) -> str:
    return f", with room for {counted(detail.unused_tokens, 'more token')}" if detail.unused_tokens else ""


def _wait(wait: Wait, console: Console, lead: str, below: str) -> None:
    """A tree: `lead` stands before its first line, `below` before all under that."""
    come_back = f"{counted(wait.blocks, 'block')}: " if wait.blocks and lead != below else ""
    rest = "│ " if wait.waits_for else "  "
    lines = textwrap.wrap(come_back + wait.text, WIDTH - len(lead) - 2, break_long_words=False, break_on_hyphens=False)
    for index, line in enumerate(lines):
        _print(console, f"{lead}{line}" if index == 0 else f"{below}{rest}{line}")
    for index, cause in enumerate(wait.waits_for):
        last = index == len(wait.waits_for) - 1
        _wait(cause, console, f"{below}{'└ ' if last else '├ '}", f"{below}{'  ' if last else '│ '}")


def _life(life: Sequence[PhaseView], console: Console) -> None:
    """A line for each phase; a reason that is long stands on a line of its own."""
    if not life:
        _print(console, "  No event about it is kept.")
        return
    _print(console, f"  {'since':<12} {'state, reason':<30}{'for':>9}{'blocks':>7}{'tokens':>8}  cost", "dim")
    for phase in life:
        name = f"{phase.state} {phase.reason}".strip().replace("PREEMPTED PREEMPTED", "PREEMPTED")
        lead = f"  {_time(phase.since, precise=True):<12} "
        if len(name) > 30:
            _print(console, f"{lead}{name}")
            lead, name = " " * len(lead), ""
        tokens = phase.computed_tokens
        line = f"{lead}{name:<30}{phase.for_s:>8.2f}s{phase.blocks:>7,}{tokens:>8,}  {_cost(phase)}"
        _print(console, line.rstrip())


def _cost(phase: PhaseView) -> str:
    if phase.recomputed:
        return f"again {phase.recomputed:,}"
    return f"+{phase.computed:,}" if phase.computed else "queued" if phase.state in _QUEUED else ""


def _story(story: Sequence[StoryView], console: Console, whole: bool) -> None:
    _print(console, "STORY" if whole else "STORY (its beginning is no longer kept)", "bold")
    if not story:
        _print(console, "  No event about it is kept.")
    for line in story:
        _wrapped(console, line.text, f"  {_time(line.at, precise=True):<13} ")


def _culprits(finding: FindingReport) -> str:
    parts = []
    if finding.culprits.requests:
        requests = finding.culprits.requests
        parts.append(("request " if len(requests) == 1 else "requests ") + listed(requests, 8))
    if finding.culprits.blocks:
        parts.append(("block " if len(finding.culprits.blocks) == 1 else "blocks ") + _ranges(finding.culprits.blocks))
    return "; ".join(parts)


def _effects(finding: FindingReport) -> list[str]:
    """What it brings about, and is not reported for itself."""
    return [
        f"{effect.code}, since {_time(effect.since)} UTC"
        + (f": {counted(len(effect.requests), 'request')}, {listed(effect.requests, 8)}" if effect.requests else "")
        for effect in finding.effects
    ]


def _ranges(numbers: Sequence[int], most: int = 6) -> str:
    """`3-9, 12 and 40 more`: block ids, neighbours together."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    words = [f"{first}-{last}" if last > first else f"{first}" for first, last in ranges[:most]]
    left = sum(last - first + 1 for first, last in ranges[most:])
    return ", ".join(words) + (f" and {left:,} more" if left else "")


def _evidence(evidence: Sequence[Evidence]) -> str:
    words = []
    for item in evidence:
        if isinstance(item.value, str):
            words.append(f"{item.name}: {item.value}")
        else:
            words.append(f"{item.name} {item.value:,}{' %' if item.unit == '%' else ''}")
    return " · ".join(words)


def _since(finding: FindingReport) -> str:
    if finding.since:
        return finding.since.replace("T", " ").replace(".000Z", "Z").replace("Z", " UTC")
    return f"{finding.position} (no time is known)"


def _tally(findings: Sequence[FindingReport]) -> str:
    counts = Counter(finding.severity for finding in findings)
    return ", ".join(f"{counts[s]} {s}" for s in reversed(SEVERITIES) if counts[s]) or "none"


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".") + "."


def _time(stamp: str | None, precise: bool = False) -> str:
    """The clock part of an RFC 3339 stamp."""
    if not stamp:
        return "?"
    return stamp[11:23] if precise else stamp[11:19]


def _bar(count: int, total: int) -> str:
    length = round(BAR * count / total)
    return ("█" * max(length, 1 if count else 0)).ljust(BAR)


def _share(count: int, total: int) -> str:
    return f"{percent(count / total):>8}" if count else ""


def _wrapped(console: Console, text: str, lead: str, style: str = "") -> None:
    lines = textwrap.wrap(text, WIDTH - len(lead), break_long_words=False, break_on_hyphens=False) or [""]
    for index, line in enumerate(lines):
        _print(console, (lead if index == 0 else " " * len(lead)) + line, style)


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
