"""Transfers of KV between two engines that fail or never end, as connectors report them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ..counted_events import is_few
from ..judgement import Evidence, TextJudgement
from ..leak.lease_burst import READ_LATE
from ..stuck.remote_load import RemoteLoad
from .written_view import COMPLAINTS, WrittenView, number_of, quotes

_TRANSFER_LINES: Final = ("transfer_timed_out", "transfer_failed")


def transfers_fail(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a transfer that a connector gives up, by a time-out or an error of the other side."""
    lines = view.lines(*_TRANSFER_LINES)
    late = [line for line in lines if line.name == "transfer_timed_out"]
    if not lines or view.lines("stale_read"):
        return
    aborted = all("aborted_by" in line.fields for line in lines)
    recovered = all("recovered" in line.fields for line in lines)
    seconds = max((number_of(line, "seconds") or 0 for line in late), default=0)
    first = min(lines, key=lambda line: line.at_ns or 0)
    yield view.finding(
        "stuck.remote-load",
        first,
        verdict="cannot-tell" if aborted and not view.states("transfer_lost", *COMPLAINTS) else "likely",
        severity="info" if recovered else None,
        evidence=(
            Evidence("failed_transfers", sum(map(view.reported.count, _TRANSFER_LINES)), "lines", "log"),
            *((Evidence("waited", seconds, "s", "log", late[0].position),) if seconds else ()),
            *quotes(lines),
        ),
        explanation=(
            "The connector reports KV transfers that did not complete"
            + (f", after a wait of {seconds:,.0f} s" if seconds else "")
            + (". The requests had been aborted, as by a client that disconnects" if aborted else "")
            + (
                ". The engine computes the KV of each such request itself"
                if recovered
                else ". Each such request waits until a time-out or an abort, unless this engine computes its KV"
            )
            + ". The other side may have exited, dropped the request, or have a different layout."
        ),
        do_now=(
            "Inspect the other side of the transfer for the same request id and time.",
            "Check that both sides run one release with one block size and compatible parallel sizes.",
        ),
        change=(
            "Let a failed fetch be computed here (vLLM: kv_load_failure_policy=recompute), and let the router retry on"
            " another pair.",
        ),
        wont_help=("A larger pool.", "A longer time-out, if the other side has dropped the request."),
        missing="the other side's log at that time: whether it sent, refused or had exited",
    )


class _CountOfLines(NamedTuple):
    """What a field of a connector's statistics counts: the code, and the sentence about it."""

    code: str
    unit: str
    what: str
    case: str


_COUNTED: Final = {
    "late": _CountOfLines(
        "corrupt.stale-remote-read",
        "reads",
        "notifications of reads that came after the request's lease had expired: the other engine may have read another"
        " request's KV, and the client gets status 200",
        "",
    ),
    "expired": _CountOfLines(
        "leak.lease-burst",
        "leases",
        "expired leases: no consumer had read the KV of these finished requests, and their blocks were kept until then",
        "",
    ),
    "failed": _CountOfLines(
        "stuck.remote-load",
        "transfers",
        "KV transfers that failed: each such request is computed here, fails, or waits until a time-out or an abort",
        "Failed transfers",
    ),
    "refused": _CountOfLines(
        "stuck.outer-tier",
        "stores",
        "stores that an outer tier refused, since nothing in it could be evicted: transfers in progress pin it, or it"
        " is smaller than one step needs. What is not stored is computed again once the pool has evicted it",
        "vLLM's offloading",
    ),
}
"""By the field of a line, the most harmful first."""


def transfers_counted(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield what a connector's lines of statistics count, each of its own interval."""
    lines = view.lines("transfer_counts")
    sums = {name: sum(number_of(line, name) or 0 for line in lines) for name in _COUNTED}
    stores = sum(number_of(line, "stores") or 0 for line in lines)
    for name, (code, unit, what, case) in _COUNTED.items():
        if not sums[name]:
            continue
        theirs = [line for line in lines if number_of(line, name)]
        few = name != "late" and is_few(round(sums[name]), round(stores) if name == "refused" else 0, view.settings)
        yield view.finding(
            code,
            theirs[0],
            severity="info" if few else "warning" if name in ("failed", "refused") else None,
            evidence=(Evidence(f"{name}_{unit}", round(sums[name]), unit, "log", theirs[-1].position), *quotes(theirs)),
            explanation=f"The connector's lines of statistics count {sums[name]:,.0f} {what}.",
            case=READ_LATE if name == "expired" and sums["late"] else case,
            missing="which requests, and their blocks: the event stream of a probe",
        )


def fetch_lasts(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a request that the scheduler's own lines show waiting for its KV for a minute, in a report of a problem."""
    lines = [line for line in view.lines("remote_wait") if line.at_ns]
    times: dict[object, list[int]] = {}
    for line in lines:
        times.setdefault(line.fields["request"], []).append(line.at_ns or 0)
    waited, request = max(((max(at) - min(at)) / 1e9, str(name)) for name, at in times.items()) if times else (0.0, "")
    if waited < view.settings(RemoteLoad.least_wait_s) or view.lines(*_TRANSFER_LINES):
        return
    theirs = [line for line in lines if line.fields["request"] == request]
    yield view.finding(
        "stuck.remote-load",
        theirs[0],
        verdict="likely" if view.is_report() else "cannot-tell",
        evidence=(Evidence("waited", round(waited, 1), "s", "log", theirs[-1].position), *quotes(theirs)),
        explanation=(
            f"The scheduler reports one request as waiting for its KV from elsewhere for {waited:,.0f} s, and no line"
            " reports a transfer that failed. The other side may still compute, have dropped the request, or have sent"
            " its KV without a notification that arrived."
        ),
        do_now=("Inspect the other side for the same request id: whether it was computed, sent and acknowledged.",),
        change=("Bound the wait: a connector's time-out with kv_load_failure_policy=recompute.",),
        wont_help=("A larger pool.",),
        missing="the other side's log at that time: whether it still computes the prompt",
    )
