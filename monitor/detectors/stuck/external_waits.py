"""Requests that wait for something outside the scheduler, or did until it came and nobody looked.

stuck.remote-load         a fetch of KV whose end is never said, or said and not taken in
stuck.lost-wakeup         the connector has said that the fetch has ended, and the engine sleeps on
stuck.promotion-starved   what it waited for has come, and the scheduler, which goes on, does not look at it
stuck.grammar             a grammar that is neither compiled nor refused

A request is in one of these at most. All need the stream; that a fetch has ended, which tells stuck.lost-wakeup from
stuck.remote-load, only some engines say (COMPLETION_DELIVERED of a living request).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.stuck.waiting_requests import (
    Living,
    is_outside,
    judged,
    overdue,
    requests,
    since_in_words,
)
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.events.kinds import Status
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import counted, duration, listed, percent

REMOTE_LOAD = "stuck.remote-load"
LOST_WAKEUP = "stuck.lost-wakeup"
PROMOTION_STARVED = "stuck.promotion-starved"
GRAMMAR = "stuck.grammar"

_SLACK_NS: Final = 1_000_000_000
"""A step that was launched so shortly after the end of a fetch may have been planned before it."""
_REFETCH: Final = "Close its connection and send the request again: it is fetched anew, or computed."


def judge(ledger: EngineLedger, settings: Settings, living: Living) -> Iterator[Judgement]:
    """Who has waited for too long, and for what."""
    outside = [record for record in living.waiting if is_outside(record)]
    ready = [record for record in living.waiting if record.ready_ns]
    fetching = [r for r in outside if r.status == Status.WAITING_FOR_REMOTE_KVS and not r.ready_ns]
    grammars = [r for r in outside if r.status == Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR]
    if fetching:
        asleep = _sleeps(ledger, living)
        unheard: list[RequestState] = []
        others: list[RequestState] = []
        for record in fetching:
            (unheard if asleep and _lies(ledger, record) else others).append(record)
        yield from _remote_load(ledger, settings, others)
        yield from _lost_wakeup(ledger, settings, unheard)
    if ready:
        yield from _promotion_starved(ledger, settings, living, ready)
    if grammars:
        yield from _grammar(ledger, settings, grammars)


def _until_ns(ledger: EngineLedger) -> int:
    """The last moment, on the engine's clock, at which it could have said that what they wait for has come: while a
    step is in flight, when that was launched; else when it was last heard.
    """
    return ledger.looked_ns if ledger.state.in_flight else ledger.heard_ns - ledger.wall(1) + 1


def _sleeps(ledger: EngineLedger, living: Living) -> bool:
    """Whether the engine's own thread does nothing: its heart beats, and no step runs and no pass is made."""
    beat = ledger.state.heartbeat
    idle = beat is not None and beat.step_in_flight < 0 and not living.running
    return idle and ledger.heartbeats > 0 and not ledger.passes_advanced


def _lies(ledger: EngineLedger, record: RequestState) -> bool:
    """Whether its fetch has ended and the engine has not looked since: has launched no step, and unpinned nothing."""
    ended_ns = record.fetch_ended_ns
    looked = any(tier.unpinned_ns >= ended_ns for tier in ledger.state.tiers.values())
    return bool(ended_ns) and not looked and ended_ns + _SLACK_NS > ledger.state.launched_ns


def _their_blocks(records: list[RequestState]) -> list[int]:
    return sorted({block for record in records for block in record.blocks})


def _began_at(record: RequestState) -> int:
    """Where its fetch began, or its wait where that is not known."""
    return record.fetching_at if record.fetching_ns else record.since_at


# -------------------------------------------------------------------- stuck.remote-load


def _remote_load(ledger: EngineLedger, settings: Settings, fetching: list[RequestState]) -> Iterator[Judgement]:
    grace = settings(REMOTE_LOAD, "grace_s")
    late = overdue(fetching, lambda r: r.fetching_ns or r.since_ns, _until_ns(ledger), grace)
    if late is None:
        return
    state, at, count = ledger.state, ledger.at, len(late.records)
    blocks = _their_blocks(late.records)
    share = len(blocks) / (state.total - state.reserved)
    ended = [record for record in late.records if record.fetch_ended_ns]
    by = f"the KV connector ({ledger.description.kv_connector})" if ledger.description.kv_connector else "the connector"
    if not ended:
        what = f"{by} has said neither that it is delivered nor that it has failed"
    elif len(ended) == count:
        what = f"{by} has said that it is done, and the engine, which goes on, has not taken that in"
    else:
        what = f"of {listed([r.id for r in ended])} {by} has said that it is done; of the others it has said nothing"
    yield judged(
        ledger,
        late,
        code=REMOTE_LOAD,
        began_at=_began_at(late.records[0]),
        blocks=tuple(blocks),
        evidence=(
            Evidence("requests_waiting", count, "requests", position=at(*map(_began_at, late.records))),
            Evidence("oldest_fetch_s", round(late.age_s, 1), "s", position=at(_began_at(late.records[0]))),
            Evidence("blocks_held", len(blocks), "blocks", position=at(*map(_began_at, late.records))),
            Evidence("share_of_pool", round(share, 4), "of the pool", position=at(*map(_began_at, late.records))),
            Evidence(
                "said_to_have_ended",
                len(ended),
                "requests",
                position=at(*map(_began_at, late.records), *(record.fetch_ended_at for record in ended)),
            ),
            Evidence(
                "connector_polls",
                state.heartbeat.connector_polls if state.heartbeat else "not heard",
                "polls",
                position=at(state.places.heartbeat),
            ),
        ),
        explanation=(
            f"{requests(late)} {'waits' if count == 1 else 'wait'} for KV that is fetched from elsewhere,"
            f" {since_in_words(ledger, late)} ({duration(late.age_s)}): {what}. {counted(len(blocks), 'block')}"
            f" ({percent(share)} of the pool) {'is' if len(blocks) == 1 else 'are'} kept for it meanwhile."
        ),
        do_now=(
            "Look at the other end of the fetch: one that died, or has dropped this KV, never answers.",
            _REFETCH,
        ),
        change=(
            "Let the fetch have a deadline after which the prompt is computed here (vLLM:"
            ' "kv_load_failure_policy": "recompute" in --kv-transfer-config covers a failure that is reported;'
            " Mooncake's consumer waits without end, #35943: upgrade).",
            "Let clients time out and retry; be sure that an abort frees the blocks (leak.remote-load-lost).",
            "If prompts need not be fetched, run without the connector (vLLM: drop --kv-transfer-config; kvscope's"
            " engine: drop --kv-connector).",
        ),
        wont_help=(
            "A larger pool, or a lower load: the request waits for a word, not for room.",
            "A lease (VLLM_NIXL_ABORT_REQUEST_TIMEOUT, --kv-lease-seconds): it ends what is kept to be sent, not what"
            " is fetched.",
        ),
    )


# -------------------------------------------------------------------- stuck.lost-wakeup


def _lost_wakeup(ledger: EngineLedger, settings: Settings, unheard: list[RequestState]) -> Iterator[Judgement]:
    state, at, beat, awake_ns = ledger.state, ledger.at, ledger.state.heartbeat, ledger.looked_ns
    if beat is None:
        return
    late = overdue(unheard, lambda r: max(r.fetch_ended_ns, awake_ns), beat.at_ns, settings(LOST_WAKEUP, "grace_s"))
    if late is None:
        return
    count, blocks = len(late.records), _their_blocks(late.records)
    yield judged(
        ledger,
        late,
        code=LOST_WAKEUP,
        began_at=late.records[0].fetch_ended_at,
        blocks=tuple(blocks),
        evidence=(
            Evidence(
                "requests_waiting", count, "requests", position=at(*(record.fetch_ended_at for record in late.records))
            ),
            Evidence("asleep_s", round(late.age_s, 1), "s", position=at(late.records[0].fetch_ended_at)),
            Evidence("scheduler_passes", beat.scheduler_passes, "passes", position=at(state.places.heartbeat)),
            Evidence("last_step", state.last_step, "step", position=at(state.places.completed)),
            Evidence("blocks_held", len(blocks), "blocks", position=at(*(record.since_at for record in late.records))),
        ),
        explanation=(
            f"The KV connector has said that the fetch of {listed(late.ids)} has ended, and for"
            f" {duration(late.age_s)} the engine has slept on: no pass, no step, and"
            f" {'it waits' if count == 1 else 'they wait'}. The process lives, so the wake-up was lost."
        ),
        do_now=(
            "Send the engine a request whose prompt is fetched too, such as the same one again: the end of that fetch"
            " wakes it, and it then finds what has come before.",
        ),
        change=(
            "It is a defect between the connector and the engine's loop: report it with the request's story (monitor"
            " explain request ID), and upgrade the connector (LMCache #4759).",
            "Until then keep the engine from sleeping: a short request whose prompt is fetched, every few seconds.",
        ),
        wont_help=(
            "Waiting: as long as nothing else comes in, nothing wakes it.",
            "Looking at the other end of the fetch: it has delivered.",
        ),
    )


# -------------------------------------------------------------------- stuck.promotion-starved


def _promotion_starved(
    ledger: EngineLedger, settings: Settings, living: Living, ready: list[RequestState]
) -> Iterator[Judgement]:
    """While the head of the queue is refused, all behind it wait, the ready ones too; unless later ones pass them."""
    if ledger.head() is not None:
        ready = [record for record in ready if _overtaken(record, living.running)]
    late = overdue(ready, lambda r: r.ready_ns, ledger.looked_ns, settings(PROMOTION_STARVED, "grace_s"))
    if late is None:
        return
    state, at, count = ledger.state, ledger.at, len(late.records)
    blocks = _their_blocks(late.records)
    overtaken = sum(record.admitted_ns > late.since_ns for record in living.running)
    yield judged(
        ledger,
        late,
        code=PROMOTION_STARVED,
        began_at=late.records[0].ready_at,
        blocks=tuple(blocks),
        evidence=(
            Evidence("requests_ready", count, "requests", position=at(*(record.ready_at for record in late.records))),
            Evidence("ready_for_s", round(late.age_s, 1), "s", position=at(late.records[0].ready_at)),
            Evidence("last_step", state.last_step, "step", position=at(state.places.completed)),
            Evidence("let_in_since", overtaken, "requests", position=at(state.places.moved)),
            Evidence("running", len(living.running), "requests", position=at(state.places.moved)),
            Evidence("blocks_held", len(blocks), "blocks", position=at(*(record.ready_at for record in late.records))),
        ),
        explanation=(
            f"{requests(late)} {'is' if count == 1 else 'are'} ready, {since_in_words(ledger, late)}"
            f" ({duration(late.age_s)}): what {'it' if count == 1 else 'they'} waited for has come. The scheduler goes"
            f" on, and has put {'it' if count == 1 else 'them'} neither back in the queue nor in a step."
        ),
        do_now=(
            "Close its connection and send the request again: a new one goes through the queue.",
            "Pause what is sent to this engine: where running requests leave the queue no turn, it gets one then.",
        ),
        change=(
            "vLLM: upgrade to a release that looks at those who are ready even if running requests take the whole"
            " budget of a step (#53130).",
            "Until then a higher --max-num-batched-tokens than --max-num-seqs requests decode at once leaves the queue"
            " a turn.",
        ),
        wont_help=(
            "Looking at the connector, or at the grammar: it has come.",
            "A larger pool: it does not wait for blocks.",
        ),
    )


def _overtaken(record: RequestState, running: list[RequestState]) -> bool:
    """Whether one that came later, and is not more urgent, was let in since it was ready."""
    return any(
        other.admitted_ns > record.ready_ns
        and other.arrived_ns > record.arrived_ns
        and other.priority >= record.priority
        for other in running
    )


# -------------------------------------------------------------------- stuck.grammar


def _grammar(ledger: EngineLedger, settings: Settings, waiting: list[RequestState]) -> Iterator[Judgement]:
    late = overdue(waiting, lambda r: r.since_ns, _until_ns(ledger), settings(GRAMMAR, "grace_s"))
    if late is None:
        return
    at, count = ledger.at, len(late.records)
    yield judged(
        ledger,
        late,
        code=GRAMMAR,
        began_at=late.records[0].since_at,
        evidence=(
            Evidence("requests_waiting", count, "requests", position=at(*(record.since_at for record in late.records))),
            Evidence("oldest_wait_s", round(late.age_s, 1), "s", position=at(late.records[0].since_at)),
            Evidence("last_step", ledger.state.last_step, "step", position=at(ledger.state.places.completed)),
        ),
        explanation=(
            f"{requests(late)} {'waits for its grammar' if count == 1 else 'wait for their grammars'},"
            f" {since_in_words(ledger, late)} ({duration(late.age_s)}). No grammar compiles for as long: either it"
            " failed and nobody took that in, or the compiler hangs on it."
        ),
        do_now=(
            f"Abort {'it' if count == 1 else 'them'} (close the connection), and look in the engine's log for an error"
            " of the grammar's compiler about that time.",
            "Compile the schema or the regular expression by itself: one that cannot be compiled fails there too.",
        ),
        change=(
            "vLLM: upgrade to a release in which a grammar that fails to compile ends its request with an error"
            " (PR #45012).",
            "Refuse schemas that are not known to compile before they are sent; bound the repeats in them.",
            "Another compiler for this engine may take it (vLLM: --structured-outputs-config"
            ' \'{"backend": "guidance"}\').',
        ),
        wont_help=(
            "A larger pool, or a lower load: it has no block, and waits for none.",
            "Sending the same request again: the same grammar is waited for again.",
        ),
    )
