"""What a KV connector asked to be kept, for too long. Each block is in one of these, by what the connector owes.

leak.remote-load-lost    KV was being fetched into the blocks when their request ended, and the fetch never reported
leak.idle-not-polled     the engine has nothing to run and does not ask its connector, so that no word can arrive
leak.finished-held       the engine asks, and the word that the blocks were sent does not come

While an engine with work does not ask either, its steps have stopped: that is stuck.engine-stalled, and no leak.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope.monitor.detectors.advice import at_hand
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.leak.deferred_blocks import heard_s, kept, oldest, overdue
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.events.kinds import Holder
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import Deferral, RequestState
from kvscope.monitor.text import clock_time, counted, duration, percent

FINISHED_HELD = "leak.finished-held"
REMOTE_LOAD_LOST = "leak.remote-load-lost"
IDLE_NOT_POLLED = "leak.idle-not-polled"

_LEASE: Final = {
    "vllm": "VLLM_NIXL_ABORT_REQUEST_TIMEOUT=480 with NIXL, or a release since PR #41383, whose leases are renewed",
    "kvscope": "--kv-lease-seconds 480",
}
NOT_ASKED_S: Final = 3.0
"""An engine asks in each pass, and heartbeats come once a second: after so long without, it does not ask."""

_RESTART = "Only a restart of this engine gives the blocks back; drain it first, before the pool is full."
_WONT_HELP = (
    "Lowering max_num_seqs or the load: live requests do not hold these blocks.",
    "A larger pool (gpu_memory_utilization): it only takes longer to fill.",
    "Resetting the prefix cache: it fails while these blocks are referenced.",
)


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """What is kept for the connector for too long."""
    sending: list[Deferral] = []
    fetching: list[Deferral] = []
    requests = ledger.state.requests
    for deferral in ledger.state.deferrals.values():
        record = requests.get(deferral.request)
        # The books have forgotten a request all of whose blocks were detached: it has ended.
        if deferral.holder == Holder.CONNECTOR and (record is None or record.is_finished):
            (fetching if record is not None and record.fetching_ns else sending).append(deferral)
    if not (sending or fetching):
        return
    asked = ledger.unpolled_s() < NOT_ASKED_S
    idle = not any(record.is_running or record.is_waiting for record in requests.values())
    if asked or idle:
        yield from _remote_load_lost(ledger, settings, fetching)
    if asked:
        yield from _finished_held(ledger, settings, sending)
    if idle:
        yield from _idle_not_polled(ledger, settings, sending)


def _by(ledger: EngineLedger) -> str:
    name = ledger.description.kv_connector
    return f"the KV connector ({name})" if name else "the KV connector"


# -------------------------------------------------------------------- leak.finished-held


def _finished_held(ledger: EngineLedger, settings: Settings, sending: list[Deferral]) -> Iterator[Judgement]:
    state = ledger.state
    late, pending = overdue(sending, lambda deferral: _waited(ledger, settings, deferral))
    if not late:
        return
    held, at = kept(ledger, late), ledger.at
    count, records = len(held.deferrals), _records(ledger, late)
    yield Judgement(
        code=FINISHED_HELD,
        engine=ledger.engine,
        verdict="likely" if state.damaged else "confirmed",
        # After a loss its release may be among what was lost; the next audit tells.
        pending=pending or state.damaged,
        since_ns=ledger.wall(held.deferrals[0].since_ns),
        position=at(held.kept_at[0]),
        requests=held.ids,
        blocks=tuple(held.blocks),
        evidence=(
            Evidence("requests_held", count, "requests", position=at(*held.kept_at)),
            Evidence("blocks_held", len(held.blocks), "blocks", position=at(*held.blocks_at)),
            Evidence("share_of_pool", round(held.share, 4), "of the pool", position=at(*held.blocks_at)),
            Evidence(
                "oldest_age_s", round(ledger.age_s(held.deferrals[0].since_ns), 1), "s", position=at(held.kept_at[0])
            ),
            Evidence(
                "prompt_tokens_of_them",
                sum(r.prompt_tokens for r in records),
                "tokens",
                position=at(*(r.arrived_at for r in records)),
            ),
            Evidence(
                "running",
                sum(r.is_running for r in state.requests.values()),
                "requests",
                position=at(state.places.moved),
            ),
            Evidence(
                "connector_polls",
                state.heartbeat.connector_polls if state.heartbeat else "not heard",
                "polls",
                position=at(state.places.heartbeat),
            ),
        ),
        explanation=(
            f"{counted(count, 'finished request')} still {'holds' if count == 1 else 'hold'}"
            f" {counted(len(held.blocks), 'block')} ({percent(held.share)} of the pool). At the end of each,"
            f" {_by(ledger)} asked to keep its blocks until it had sent them, and has never said that it is done."
            f" {oldest(ledger, held)}"
        ),
        do_now=(
            "Look at the other end of the transfers: a consumer that died, or lost them, cannot confirm them.",
            _RESTART,
        ),
        change=(
            f"Give the connector a lease, so that an unconfirmed transfer ends by itself: {at_hand(ledger, **_LEASE)}.",
            "If requests need not be handed on, run without the connector: drop"
            f" {at_hand(ledger, vllm='--kv-transfer-config', kvscope='--kv-connector')}.",
        ),
        wont_help=_WONT_HELP,
        missing="the events that were lost" if state.damaged else "",
    )


def _waited(ledger: EngineLedger, settings: Settings, deferral: Deferral) -> tuple[float, float]:
    """How long beyond its lease, or its request's end if it has none, and how long it may."""
    if deferral.lease_deadline_ns:
        return heard_s(ledger, deferral.lease_deadline_ns), settings(FINISHED_HELD, "lease_slack_s")
    return heard_s(ledger, deferral.since_ns), settings(FINISHED_HELD, "grace_s")


def _records(ledger: EngineLedger, deferrals: list[Deferral]) -> list[RequestState]:
    requests = ledger.state.requests
    return [requests[deferral.request] for deferral in deferrals if deferral.request in requests]


# -------------------------------------------------------------------- leak.idle-not-polled


def _idle_not_polled(ledger: EngineLedger, settings: Settings, sending: list[Deferral]) -> Iterator[Judgement]:
    state = ledger.state
    unpolled = ledger.unpolled_s()
    grace = settings(IDLE_NOT_POLLED, "grace_s")
    late, pending = overdue(sending, lambda deferral: (min(unpolled, heard_s(ledger, deferral.since_ns)), grace))
    if not late:
        return
    held, at = kept(ledger, late), ledger.at
    count = len(held.deferrals)
    assert state.heartbeat is not None
    yield Judgement(
        code=IDLE_NOT_POLLED,
        engine=ledger.engine,
        verdict="likely" if state.damaged else "confirmed",
        pending=pending or state.damaged,
        since_ns=ledger.wall(state.heartbeat.at_ns) - round(unpolled * 1e9),
        position=at(ledger.polled_at),
        requests=held.ids,
        blocks=tuple(held.blocks),
        evidence=(
            Evidence("requests_held", count, "requests", position=at(*held.kept_at)),
            Evidence("blocks_held", len(held.blocks), "blocks", position=at(*held.blocks_at)),
            Evidence("share_of_pool", round(held.share, 4), "of the pool", position=at(*held.blocks_at)),
            Evidence("not_polled_for_s", round(unpolled, 1), "s", position=at(ledger.polled_at)),
            Evidence("connector_polls", state.heartbeat.connector_polls, "polls", position=at(state.places.heartbeat)),
            Evidence("running", 0, "requests", position=at(state.places.moved)),
            Evidence("waiting", 0, "requests", position=at(state.places.moved)),
        ),
        explanation=(
            f"The engine has nothing to run and has not asked {_by(ledger)} for {duration(unpolled)}:"
            f" {counted(count, 'finished request')} {'keeps' if count == 1 else 'keep'}"
            f" {counted(len(held.blocks), 'block')} ({percent(held.share)} of the pool). The transfers may"
            f" be done by now, and nobody hears it. {oldest(ledger, held)}"
        ),
        do_now=("Send the engine any request, of one token: it asks again as long as that runs, and the blocks come.",),
        change=(
            "Until the engine asks while it is idle, keep it from being so: a request of max_tokens 1 every few seconds"
            " (vLLM: a prefill instance sleeps when it has no request, #41180).",
        ),
        wont_help=(
            "Waiting: as long as nothing comes in, nothing changes.",
            "Looking at the consumer: what it has confirmed lies unread here.",
            "A lease: it is looked at only when the engine wakes.",
            "Resetting the prefix cache: it fails while these blocks are referenced.",
        ),
        missing="the events that were lost" if state.damaged else "",
    )


# -------------------------------------------------------------------- leak.remote-load-lost


def _remote_load_lost(ledger: EngineLedger, settings: Settings, fetching: list[Deferral]) -> Iterator[Judgement]:
    state = ledger.state
    grace = settings(REMOTE_LOAD_LOST, "grace_s")
    late, pending = overdue(fetching, lambda deferral: (heard_s(ledger, deferral.since_ns), grace))
    if not late:
        return
    held, at = kept(ledger, late), ledger.at
    count = len(held.deferrals)
    records = _records(ledger, late)
    first = min(records, key=lambda record: record.fetching_ns)
    began = first.fetching_ns
    ended = [record for record in records if record.fetch_ended_ns]
    yield Judgement(
        code=REMOTE_LOAD_LOST,
        engine=ledger.engine,
        verdict="likely" if state.damaged else "confirmed",
        pending=pending or state.damaged,
        since_ns=ledger.wall(held.deferrals[0].since_ns),
        position=at(held.kept_at[0]),
        requests=held.ids,
        blocks=tuple(held.blocks),
        evidence=(
            Evidence("requests_held", count, "requests", position=at(*held.kept_at)),
            Evidence("blocks_held", len(held.blocks), "blocks", position=at(*held.blocks_at)),
            Evidence("share_of_pool", round(held.share, 4), "of the pool", position=at(*held.blocks_at)),
            Evidence(
                "oldest_age_s", round(ledger.age_s(held.deferrals[0].since_ns), 1), "s", position=at(held.kept_at[0])
            ),
            Evidence("oldest_fetch_s", round(ledger.age_s(began), 1), "s", position=at(first.fetching_at)),
            Evidence(
                "of_which_the_connector_said_it_ended",
                len(ended),
                "fetches",
                position=at(*held.kept_at, *(r.fetch_ended_at for r in ended)),
            ),
            Evidence(
                "running",
                sum(r.is_running for r in state.requests.values()),
                "requests",
                position=at(state.places.moved),
            ),
        ),
        explanation=(
            f"{counted(count, 'request')} ended while {_by(ledger)} was fetching KV into"
            f" {'its' if count == 1 else 'their'} {counted(len(held.blocks), 'block')} ({percent(held.share)} of the"
            " pool). The blocks must stay until the fetch has reported that it is delivered or has failed, since it"
            " may still write to them, and"
            f" {'the engine has not taken that in, though the connector said so' if ended else 'it never has'}."
            f" The first was begun at {clock_time(ledger.wall(began))}."
            f" {oldest(ledger, held)}"
        ),
        do_now=(
            "Look at the producer that was to send this KV: one that died, or dropped the request too, never reports.",
            _RESTART,
        ),
        change=(
            "vLLM: nothing ends such a fetch by itself (NIXL in push mode, #46283; Mooncake, #35943); upgrade to a"
            " release in which an aborted fetch has a deadline, or let the consumer pull (kv_connector NixlConnector).",
            "Let clients time out later than a fetch takes: each request that is aborted meanwhile is at risk.",
        ),
        wont_help=(
            *_WONT_HELP,
            "A lease (VLLM_NIXL_ABORT_REQUEST_TIMEOUT): it ends what is kept to be sent, not what is fetched.",
        ),
        missing="the events that were lost" if state.damaged else "",
    )
