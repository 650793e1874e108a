"""leak.finished-held: blocks that a KV connector asked to be kept, and has not said that it is done with."""

from __future__ import annotations

from collections.abc import Iterator

from monitor.detectors.judgement import Evidence, Judgement
from monitor.detectors.thresholds import Settings
from monitor.events.kinds import FIRST_FINISHED, Holder
from monitor.events.records import Deferral, RequestState
from monitor.ledger.ledger import EngineLedger
from monitor.ledger.words import clock_time, counted, duration, percent

FINISHED_HELD = "leak.finished-held"


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """What is kept for the connector for too long."""
    state = ledger.state
    held = [
        deferral
        for deferral in state.deferrals.values()
        if deferral.holder == Holder.CONNECTOR and _has_ended(state.requests.get(deferral.request))
    ]
    overdue = [deferral for deferral in held if _overdue_s(ledger, settings, deferral) > 0]
    if not overdue:
        near = [d for d in held if ledger.age_s(d.since_ns) > settings(FINISHED_HELD, "grace_s") / 2]
        if not near:
            return
        overdue = near
        pending = True
    else:
        pending = state.damaged  # its release may be among what was lost; the next audit tells
    overdue.sort(key=lambda deferral: (deferral.since_ns, deferral.request))
    blocks = sorted(set().union(*(deferral.blocks for deferral in overdue)))
    oldest = overdue[0]
    age = ledger.age_s(oldest.since_ns)
    usable = state.total - state.reserved
    connector = ledger.description.kv_connector
    by = f"the KV connector ({connector})" if connector else "the KV connector"
    prompt_tokens = sum(state.requests[d.request].prompt_tokens for d in overdue if d.request in state.requests)
    yield Judgement(
        code=FINISHED_HELD,
        engine=ledger.engine,
        verdict="likely" if state.damaged else "confirmed",
        pending=pending,
        since_ns=ledger.wall(oldest.since_ns),
        position=str(ledger.position()),
        requests=tuple(deferral.id for deferral in overdue),
        blocks=tuple(blocks),
        evidence=(
            Evidence("requests_held", len(overdue), "requests"),
            Evidence("blocks_held", len(blocks), "blocks"),
            Evidence("share_of_pool", round(len(blocks) / usable, 4), "of the pool"),
            Evidence("oldest_age_s", round(age, 1), "s"),
            Evidence("prompt_tokens_of_them", prompt_tokens, "tokens"),
            Evidence("running", sum(r.is_running for r in state.requests.values()), "requests"),
            Evidence("connector_polls", state.heartbeat.connector_polls if state.heartbeat else "not heard", "polls"),
        ),
        explanation=(
            f"{counted(len(overdue), 'finished request')} still {'holds' if len(overdue) == 1 else 'hold'}"
            f" {counted(len(blocks), 'block')} ({percent(len(blocks) / usable)} of the pool). At the end of each, {by}"
            f" asked to keep its blocks until it had sent them, and has never said that it is done. The oldest,"
            f" {oldest.id}, ended at {clock_time(ledger.wall(oldest.since_ns))}, {duration(age)} ago."
        ),
        do_now=(
            "Look at the other end of the transfers: a consumer that died, or lost them, cannot confirm them.",
            "Only a restart of this engine gives the blocks back; drain it first, before the pool is full.",
        ),
        change=(
            "Give the connector a lease, so that an unconfirmed transfer ends by itself"
            " (vLLM with NIXL: VLLM_NIXL_ABORT_REQUEST_TIMEOUT; kvscope's engine: --kv-lease-seconds).",
            "If requests need not be handed on, run without the connector (vLLM: drop --kv-transfer-config;"
            " kvscope's engine: drop --kv-connector).",
        ),
        wont_help=(
            "Lowering max_num_seqs or the load: live requests do not hold these blocks.",
            "A larger pool (gpu_memory_utilization): it only takes longer to fill.",
            "Resetting the prefix cache: it fails while these blocks are referenced.",
        ),
        missing="the events that were lost" if state.damaged else "",
    )  # fmt: skip


def _has_ended(record: RequestState | None) -> bool:
    """Also true of one that the books have forgotten because all its blocks were detached."""
    return record is None or record.status >= FIRST_FINISHED


def _overdue_s(ledger: EngineLedger, settings: Settings, deferral: Deferral) -> float:
    """Seconds beyond its lease, or beyond the grace if it has none."""
    if deferral.lease_deadline_ns:
        past = (ledger.now_ns - ledger.wall(deferral.lease_deadline_ns)) / 1e9
        return past - settings(FINISHED_HELD, "lease_slack_s")
    return ledger.age_s(deferral.since_ns) - settings(FINISHED_HELD, "grace_s")
