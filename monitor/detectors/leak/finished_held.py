"""leak.finished-held: finished requests keep their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...base.text import counted, percent
from ...ledger.engine_ledger import EngineLedger
from ...ledger.records import Deferral, RequestState
from ..advice import at_hand, either_kind
from ..detector import SampleNeed, Settings, StreamDetector, Threshold
from ..engine_pace import (
    FEWEST_SEEN,
    HELD_GRACE_S,
    MORE_TIME,
    TIMES_LONGEST_WAIT,
    UNPROVEN_SHARE,
    UNSEEN_TIMES,
    UNSEEN_TOGETHER_S,
)
from ..judgement import LIVE_REQUEST, Alternative, Evidence, HoldsBlocks, Unless, seen
from .block_effects import ROOM_IS_GONE_FOR_GOOD
from .deferred_blocks import (
    HELD_LEASE_SLACK_S,
    Kept,
    connector_holds,
    connector_text,
    kept,
    may_be_first_transfers,
    oldest_deferral_text,
    overdue_sends,
    records_of,
)

LEASE_FLAGS: Final = {
    "vllm": "VLLM_NIXL_ABORT_REQUEST_TIMEOUT=480 with NIXL, or a release since PR #41383, whose leases are renewed",
    "kvscope": "--kv-lease-seconds 480",
}
CONNECTOR_FLAGS: Final = {"vllm": "--kv-transfer-config", "kvscope": "--kv-connector"}


def _missing(damaged: bool, polled: bool, unknown_lease: bool, without_lease: bool) -> str:
    """Return the evidence that would confirm it."""
    if damaged:
        return "the lost events"
    if not polled:
        return "an answer from the connector: the engine does not poll it although requests wait"
    if unknown_lease:
        return "the connector's lease, which it does not expose: its consumer may renew it and free the blocks later"
    if without_lease:
        return "a lease, or the connector's own record of the transfer: without either, a slow transfer looks the same"
    return ""


class FinishedHeld(StreamDetector[HoldsBlocks]):
    """Blocks that a KV connector keeps for finished requests, and never frees.

    Sees: blocks kept until a connector reports that it has sent them, beyond their lease, or far beyond what others
    took.
    Confirmed when: the engine polls the connector, and leases show that no transfer still needs the blocks.
    Likely when: the connector shows no lease or is not polled although requests wait, or events were lost.
    Cannot tell: first transfers of an engine may simply be slow.
    Not when: an engine with work does not poll either (stuck.engine-stalled); an idle one has not polled since they
    were due (leak.idle-not-polled).
    """

    code = "leak.finished-held"
    severity = "error"
    title = "Finished requests keep their blocks"
    moves_kv = "send"

    grace_s = HELD_GRACE_S
    lease_slack_s = HELD_LEASE_SLACK_S
    times_longest = TIMES_LONGEST_WAIT
    unseen_times = UNSEEN_TIMES
    unseen_together_s = UNSEEN_TOGETHER_S
    fewest_seen = FEWEST_SEEN
    unproven_share = UNPROVEN_SHARE
    starved_s = Threshold(
        60, "s", "twice the 30 s for which NIXL renews a lease: a live consumer has fetched something by then"
    )
    lease_s = Threshold(
        480, "s", "vLLM's default lease of blocks that wait for a consumer, before releases that renew leases"
    )
    min_samples = Threshold(
        6, "samples", "fewer changes follow anything by chance: two large prompts after a quiet spell are enough"
    )
    min_fit = Threshold(0.9, "r", "changes of usage follow the prompts admitted meanwhile. Growth by decoding does not")
    max_constant = Threshold(0.5, "of the rise", "growth by decoding comes in every interval, whatever is taken in")
    max_running_left = Threshold(
        0.25, "of the most", "a drain: so few requests are left that the others' blocks must have come back"
    )
    min_left = Threshold(4, "requests", "fewer that leave may be fewer than the gauge shows between two samples")
    min_rise = Threshold(0.2, "of the pool", "a smaller rise is within one request's size")
    max_fall = Threshold(0.02, "of the pool", "where blocks do come back, a drain lowers usage by more than that")
    idle_floor = Threshold(0.02, "of the pool", "with nothing running, usage above this is not rounding")
    full_pool = Threshold(
        0.9,
        "of the pool",
        "below this, requests that wait may wait for something other than blocks, if that is not exposed",
    )
    sample_need = SampleNeed(
        3, starved_s, "nothing runs while requests wait for room. At idle, where a KV connector may hold blocks, 8 min"
    )
    alternatives = (
        LIVE_REQUEST,
        Alternative("a transfer of normal duration", "the connector's lease, or the pending period, has passed"),
        Unless("a slow transfer that no lease bounds", "the connector's lease has passed"),
        Unless("a consumer that renews its lease while its own queue is long", "the leases that the connector shows"),
    )
    causes = ROOM_IS_GONE_FOR_GOOD

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Yield the blocks kept for a connector that is polled and never reports."""
        late, pending = overdue_sends(ledger, settings)
        if late:
            yield self._held(ledger, settings, late, pending)

    def _held(self, ledger: EngineLedger, settings: Settings, late: list[Deferral], pending: bool) -> HoldsBlocks:
        state, polled = ledger.state, connector_holds(ledger).polled
        held, at = kept(ledger, late), ledger.at
        first = may_be_first_transfers(ledger, settings, held)
        count, records = len(held.deferrals), records_of(ledger, late)
        unknown_lease = any(deferral.lease_deadline_ns < 0 for deferral in late)
        without_lease = any(deferral.lease_deadline_ns == 0 for deferral in late) and not ledger.description.kv_lease_s
        missing = _missing(state.damaged, polled, unknown_lease, without_lease)
        return self.holding(
            ledger,
            verdict="cannot-tell" if first else "likely" if missing else "confirmed",
            severity="info" if first else None,
            pending=pending,
            since_ns=ledger.wall(held.deferrals[0].since_ns),
            position=at(held.kept_at[0]),
            requests=held.ids,
            share_of_pool=round(held.share, 4),
            blocks=tuple(held.blocks),
            evidence=_held_evidence(ledger, held, records),
            explanation=(
                f"{counted(count, 'finished request')} still {'holds' if count == 1 else 'hold'}"
                f" {counted(len(held.blocks), 'block')} ({percent(held.share)} of the pool). At"
                f" {'its end' if count == 1 else 'the end of each'}, {connector_text(ledger)} asked to keep its"
                f" blocks until it had sent them, and never reported completion. {oldest_deferral_text(ledger, held)}"
            ),
            case="If the connector shows no lease" if unknown_lease else "",
            numbers={either_kind(**flags): at_hand(ledger, **flags) for flags in (LEASE_FLAGS, CONNECTOR_FLAGS)},
            missing=MORE_TIME if first else missing,
        )


def _held_evidence(ledger: EngineLedger, held: Kept, records: list[RequestState]) -> tuple[Evidence, ...]:
    state, at, count = ledger.state, ledger.at, len(held.deferrals)
    return (
        seen("requests_held", count, "requests", at(*held.kept_at)),
        seen("blocks_held", len(held.blocks), "blocks", at(*held.blocks_at)),
        seen("share_of_pool", round(held.share, 4), "of the pool", at(*held.blocks_at)),
        seen("oldest_age_s", round(ledger.age_s(held.deferrals[0].since_ns), 1), "s", at(held.kept_at[0])),
        seen(
            "prompt_tokens_held", sum(r.prompt_tokens for r in records), "tokens", at(*(r.arrived_at for r in records))
        ),
        seen("running", sum(r.is_running for r in state.requests.values()), "requests", at(state.places.moved)),
        seen(
            "connector_polls",
            state.heartbeat.connector_polls if state.heartbeat else "not heard",
            "polls",
            at(state.places.heartbeat),
        ),
    )
