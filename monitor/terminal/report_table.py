"""The doctor's report for a person: a table of 80 columns that is good in black and white, one line each, Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console

from ..base.text import counted, listed, percent
from ..detectors.findings import FindingReport
from ..detectors.judgement import SEVERITIES, Evidence
from ..detectors.measured_harm import UNSEEN_CAUSE
from ..ledger.pool_account import share_of_pool
from ..questions.schema import PART_LABELS
from ..sources.targets import TargetKind
from .explain_text import POSITION
from .report import BalanceReport, Report, TargetReport
from .terminal import clock, put_line, wrapped
from .watch_mode import Change

SIGNS = {"none": "?", "info": "·", "warning": "‼", "error": "×", "critical": "×"}
STYLES = {"none": "bold", "info": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}
REPORT_HOLDERS = ("running", "waiting", "finished", "cached_idle", "free", "reserved", "unaccounted")
REPORT_BAR = 34
FEW_ENGINES = 3
"""The pools of so many are shown whole, though nothing is found on them."""
HAVE_A_PAST = (TargetKind.RECORDING, TargetKind.BUNDLE, TargetKind.SERVICE)
NOT_EXPOSED = "not exposed"


def report_table(report: Report, console: Console) -> None:
    """Everything, in 80 columns: the answer first, then the engines it is about."""
    for target in report.targets:
        if target.status != "ok":
            put_line(console, f"? {target.target}", "bold")
            wrapped(console, target.error, "  ")
            for note in target.notes:
                wrapped(console, f"Note: {note}.", "  ")
            console.print()
    read = [target for target in report.targets if target.status == "ok"]
    if report.findings or read:
        put_line(console, f"FINDINGS  {_report_tally(report)}", "bold")
        console.print()
    for finding in sorted(report.measured(), key=lambda one: -SEVERITIES.index(one.severity)):
        _report_finding(finding, _look(report, finding), _runbook(report, finding), console)
    _report_hypotheses(report, console)
    if read and not report.findings:
        put_line(console, "  No problem found.")
        console.print()
    for target in read:
        _target_lines(report, target, console)


def _report_hypotheses(report: Report, console: Console) -> None:
    for finding in report.hypotheses():
        put_line(console, f"{SIGNS[finding.severity]} {finding.code}", STYLES[finding.severity])
        wrapped(console, finding.explanation, "  ")
        for text in finding.do_now:
            wrapped(console, text, "  Do now     ")
        for text in _runbook(report, finding):
            wrapped(console, text, "  Runbook    ")
        console.print()
    for missing in dict.fromkeys(finding.missing for finding in report.hypotheses()):
        wrapped(console, missing, "  To be sure ")
        console.print()


def _target_lines(report: Report, target: TargetReport, console: Console) -> None:
    """Its engines, those with findings first, and of many the others in a line each."""
    named = {finding.engine for finding in report.measured()}
    balances = [balance for balance in report.balances if balance.target == target.target]
    for balance in sorted(balances, key=lambda one: one.engine not in named):
        if len(report.balances) > FEW_ENGINES and balance.engine not in named:
            put_line(console, f"ENGINE {balance.engine}  {_headline(balance)}")
        else:
            _balance_lines(balance, target, console)
    for note in target.notes:
        wrapped(console, f"Note: {note}.", "  ")
        console.print()


def short(report: Report, console: Console) -> None:
    """Print one line for each target that could not be inspected, and for each finding."""
    for target in report.targets:
        if target.status != "ok":
            put_line(console, f"{target.status} {target.target}: {target.error}")
    for balance in report.balances:
        if balance.faults:
            put_line(console, f"note {balance.engine}: {_faults(balance)}")
    for finding in report.findings:
        culprits = _culprits(finding)
        put_line(
            console,
            f"{finding.severity} {finding.verdict} {finding.code} {finding.engine}"
            f"{' [' + culprits + ']' if culprits else ''}: {first_sentence(finding.explanation)}",
        )


def markdown(report: Report, console: Console) -> None:
    """For a ticket or a chat."""
    out = ["# kvscope doctor", ""]
    for target in report.targets:
        if target.status != "ok":
            out += [f"**{target.target}**: {target.error}", ""]
        out += [line for note in target.notes for line in (f"Note: {note}.", "")]
    for balance in report.balances:
        out += [f"## {balance.engine}", "", _headline(balance), ""]
        if balance.faults:
            out += [f"**{_faults(balance)}**", ""]
        if balance.total is not None:
            out += ["| holder | blocks |", "|---|---:|"]
            out += [f"| {PART_LABELS.get(h, h)} | {getattr(balance, h):,} |" for h in REPORT_HOLDERS]
            out += [f"| **total** | {balance.total:,} |", ""]
    out += ["## Findings", "", _report_tally(report), ""]
    for finding in report.findings:
        severity = "hypothesis" if finding.severity == "none" else finding.severity
        out += [f"### {severity}: {finding.code} ({finding.verdict})", "", finding.explanation, ""]
        if culprits := _culprits(finding):
            out += [f"- Culprits: {culprits}"]
        out += [f"- Since: {_since(finding)}", f"- Evidence: {_evidence(finding.evidence)}"]
        alternatives = (("Excluded", _excluded(finding)), ("Not excluded", _remaining(finding)))
        out += [f"- {name}: {text}" for name, text in alternatives if text]
        if look := _look(report, finding):
            out += [f"- Look: `{look}`"]
        out += [f"- Effect: {effect}" for effect in _effects(finding)]
        for name, items in (("Do now", finding.do_now), ("Change", finding.change), ("Won't help", finding.wont_help)):
            out += [f"- {name}: {item}" for item in items]
        if finding.missing:
            out += [f"- To be sure: {finding.missing}"]
        out += [f"- Runbook: {' or '.join(f'`{text}`' for text in _runbook(report, finding))}", ""]
    for line in out:
        put_line(console, line)


def change(changed: Change, console: Console) -> None:
    """One line and what it means, as `--watch` prints it."""
    finding = changed.finding
    lead = f"{clock(changed.at)} {changed.what:<9} "
    over = f", since {clock(finding.since)}" if changed.what == "resolved" and finding.since else ""
    head = f"{finding.severity} {finding.code}, {finding.verdict}{over}, on {finding.engine}"
    wrapped(console, head, lead, "green" if changed.what == "resolved" else STYLES[finding.severity])
    if changed.what != "resolved":
        for text in (finding.explanation, *(f"Do now: {todo}" for todo in finding.do_now[:1])):
            wrapped(console, text, " " * len(lead))


# -------------------------------------------------------------------- parts


def _balance_lines(balance: BalanceReport, target: TargetReport, console: Console) -> None:
    put_line(console, f"ENGINE {balance.engine}", "bold")
    wrapped(console, f"{target.kind} {balance.target}", "  ")
    wrapped(console, _headline(balance), "  ")
    if balance.faults:
        wrapped(console, _faults(balance), "  ! ", "bold yellow")
    if balance.uncertain_since:
        wrapped(console, f"Events were lost: figures since {clock(balance.uncertain_since)} may be wrong", "  ! ")
    console.print()
    if balance.total is None:
        usage = NOT_EXPOSED if balance.usage is None else percent(balance.usage)
        put_line(console, f"  usage           {usage}")
        wrapped(console, "which request holds which block is not exposed by this target", "  by holder       ")
        console.print()
        return
    for holder in REPORT_HOLDERS:
        count = getattr(balance, holder)
        style = "bold red" if holder == "unaccounted" and count else ""
        label = PART_LABELS.get(holder, holder)
        share = share_of_pool(count, balance.total - (balance.reserved or 0)) if holder != "reserved" else None
        figures = f"{count:>10,}  {f'{percent(share):>8}' if share else ''}"
        put_line(console, f"  {label:<15} {_report_bar(count, balance.total)} {figures}".rstrip(), style)
    put_line(console, f"  {'total':<15} {'':<{REPORT_BAR}} {balance.total:>10,}")
    if balance.unexplained_references:
        extra = counted(balance.unexplained_references, "reference")
        wrapped(console, f"{extra} explained by no living request and no announced deferral", "  ! ", "bold red")
    console.print()


def _faults(balance: BalanceReport) -> str:
    return f"Faults were switched on by hand: {', '.join(balance.faults)}"


def _headline(balance: BalanceReport) -> str:
    parts = [balance.status]
    if balance.running_requests is not None:
        reasons = ", ".join(f"{reason} {count}" for reason, count in balance.waiting_by_reason.items())
        number = "an unknown number" if balance.waiting_requests is None else balance.waiting_requests
        waiting = f"{number} waiting" + (f" ({reasons})" if reasons else "")
        parts.append(f"{balance.running_requests} running, {waiting}")
    if block_size := balance.configuration.get("block_size"):
        parts.append(f"blocks of {block_size} tokens")
    if balance.step is not None and balance.step >= 0:
        parts.append(f"step {balance.step:,}")
    if balance.at:
        parts.append(f"at {clock(balance.at)}")
    return " · ".join(parts)


def _report_finding(finding: FindingReport, look: str, runbook: list[str], console: Console) -> None:
    resolved = f", resolved {clock(finding.resolved_at)}" if finding.resolved_at else ""
    head = f"{SIGNS[finding.severity]} {finding.severity}  {finding.code}  {finding.verdict}{resolved}"
    put_line(console, head, STYLES[finding.severity])
    wrapped(console, finding.explanation, "  ")
    rows: list[tuple[str, Iterable[str]]] = [
        ("Do now", finding.do_now),
        ("Change", finding.change),
        ("Won't help", finding.wont_help),
        ("To be sure", [finding.missing]),
        ("Engine", [finding.engine]),
        # A state without a start time needs no line about it.
        ("Since", [_since(finding)] if finding.since or finding.severity != "info" else []),
        ("Before", [f"{clock(one.since)} to {clock(one.resolved_at)} UTC" for one in finding.earlier]),
        ("Culprits", [_culprits(finding)]),
        ("Effects", _effects(finding)),
        ("Evidence", [_evidence(finding.evidence)]),
        ("Excluded", [_excluded(finding)]),
        ("Not excl.", [_remaining(finding)]),
        ("Look", [look if finding.severity != "info" else ""]),
        ("Runbook", runbook),
    ]
    for name, texts in rows:
        for index, text in enumerate(filter(None, texts)):
            wrapped(console, text, f"  {name if index == 0 else '':<11}")
    console.print()


def _look(report: Report, finding: FindingReport) -> str:
    """Return the address that opens its first event, or an empty string where it is in no stream, or the target has no
    past.
    """
    if not POSITION.fullmatch(finding.position):
        return ""
    for target in report.targets:
        if finding.engine in target.engines and target.kind in HAVE_A_PAST:
            return f"monitor explain event {finding.position} {target.target}"
    return ""


def _runbook(report: Report, finding: FindingReport) -> list[str]:
    """Where to read the runbook: the command that prints it, and the page of the service that was examined."""
    services = [t.target for t in report.targets if t.kind == TargetKind.SERVICE and finding.engine in t.engines]
    return [f"monitor runbook {finding.code}", *(f"{url.rstrip('/')}/{finding.runbook}" for url in services[:1])]


def _culprits(finding: FindingReport) -> str:
    parts = []
    if finding.culprits.requests:
        requests = finding.culprits.requests
        parts.append(("request " if len(requests) == 1 else "requests ") + listed(requests, 8))
    if finding.culprits.blocks:
        parts.append(("block " if len(finding.culprits.blocks) == 1 else "blocks ") + _ranges(finding.culprits.blocks))
    return "; ".join(parts)


def _effects(finding: FindingReport) -> list[str]:
    """Return its effects, which are not reported on their own."""
    return [
        f"{effect.code}, since {clock(effect.since)} UTC"
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


def _excluded(finding: FindingReport) -> str:
    return " · ".join(f"{one.name} ({one.excluded_by})" for one in finding.alternatives if one.excluded_by)


def _remaining(finding: FindingReport) -> str:
    remaining = [one.name for one in finding.alternatives if not one.excluded_by]
    return " · ".join(name for name in remaining if name != UNSEEN_CAUSE)


def _since(finding: FindingReport) -> str:
    if finding.since:
        return finding.since.replace("T", " ").replace(".000Z", "Z").replace("Z", " UTC")
    return f"{finding.position} (no time is known)"


def _report_tally(report: Report) -> str:
    counts = Counter(finding.severity for finding in report.measured())
    tally = [f"{counts[s]} {s}" for s in reversed(SEVERITIES) if counts[s]]
    if hypotheses := len(report.hypotheses()):
        tally.append(f"{hypotheses} {'hypothesis' if hypotheses == 1 else 'hypotheses'}, nothing measured")
    return ", ".join(tally) or "none"


def first_sentence(text: str) -> str:
    """Return the first sentence of an explanation."""
    return text.split(". ")[0].rstrip(".") + "."


def _report_bar(count: int, total: int) -> str:
    length = round(REPORT_BAR * count / total)
    return ("█" * max(length, 1 if count else 0)).ljust(REPORT_BAR)
