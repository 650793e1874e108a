"""leak.lease-burst: blocks of finished requests that come back only as their leases run out, many at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final, NamedTuple

from ...base.text import counted, duration, percent
from ...contract.kinds import Holder
from ...ledger.engine_ledger import EngineLedger
from ...ledger.records import UNKNOWN_POSITION, LapsedLease
from ..counted_events import EVENTS_WINDOW_S, MIN_EVENT_SHARE, MIN_EVENTS, counted_events
from ..detector import FromSamples, Settings, StreamDetector, Threshold
from ..judgement import Alternative, Judgement, seen


class LapseBurst(NamedTuple):
    """Blocks that were freed together, and where the last of them was."""

    blocks: int
    at: int


def _largest_burst(lapses: Sequence[LapsedLease], within_s: float) -> LapseBurst:
    """Return the largest number of blocks freed within that time. `lapses` are in the order of their ends.

    A block counts once, though it may be of several of them, or be taken and freed again.
    """
    most = LapseBurst(0, UNKNOWN_POSITION)
    freed: Counter[int] = Counter()
    first = 0
    for lapse in lapses:
        freed.update(lapse.blocks)
        while lapse.at_ns - lapses[first].at_ns > within_s * 1e9:
            for block in lapses[first].blocks:
                freed[block] -= 1
                if not freed[block]:
                    del freed[block]
            first += 1
        most = max(most, LapseBurst(len(freed), lapse.at), key=lambda burst: burst.blocks)
    return most


HALF_A_LEASE: Final = 0.5
READ_LATE: Final = "Blocks read after their lease"
"""The case of the runbook where shorter leases would do harm."""
EITHER_END: Final = "whether the lease or the consumer ended each: the engine reports both in the same way"


class LeaseBurst(StreamDetector[Judgement]):
    """Blocks that only the end of a lease brought back.

    Sees: finished requests, several of them or with much of the pool, whose blocks became free when their leases
    expired.
    Confirmed when: the engine names their leases as what ended the wait.
    Likely when: it reports an expired lease and a completed transfer in the same way, so that only the times tell.
    Not when: one or two requests kept few blocks: clients disconnect between the two engines.
    """

    code = "leak.lease-burst"
    severity = "warning"
    title = "Blocks become free only when their leases expire"
    moves_kv = "send"
    recurs = True

    min_requests = Threshold(3, "requests", "one or two are clients that disconnected between the two engines")
    min_share = Threshold(
        0.05, "of the pool", "fewer leases are information from here on: less is not what others wait for"
    )
    burst_s = Threshold(1, "s", "blocks that are freed within a second delay no queue for longer")
    remember_s = Threshold(
        600, "s", "leases last up to minutes, and two that expire minutes apart belong to the same incident"
    )
    events_window_s = EVENTS_WINDOW_S
    min_events = MIN_EVENTS
    min_event_share = MIN_EVENT_SHARE
    alternatives = (
        Alternative(
            "one client that disconnected, with few blocks",
            "the leases of several requests expired, or they kept much of the pool",
        ),
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield what leases, and they alone, have ended recently."""
        lapses = self._recent_lapses(ledger, settings)
        requests = tuple(dict.fromkeys(lapse.id for lapse in lapses))
        if not self._matters(ledger, settings, lapses):
            return
        state, at = ledger.state, ledger.at
        proven = self._matters(ledger, settings, [lapse for lapse in lapses if lapse.named])
        blocks = sorted({block for lapse in lapses for block in lapse.blocks})
        longest = max(lapses, key=lambda lapse: lapse.at_ns - lapse.since_ns)
        lease = (longest.at_ns - longest.since_ns) / 1e9
        burst = _largest_burst(lapses, settings(self.burst_s))
        under_lease = [d for d in state.deferrals.values() if d.holder == Holder.CONNECTOR and d.lease_deadline_ns > 0]
        leased = len(under_lease)
        yield self.finding(
            ledger,
            severity="info" if len(requests) < settings(self.min_requests) else None,
            since_ns=ledger.wall(lapses[0].since_ns),
            position=at(lapses[0].at),
            requests=requests,
            blocks=tuple(blocks),
            evidence=(
                seen("leases_expired", len(requests), "leases", at(lapses[-1].at)),
                seen("blocks_under_expired_leases", len(blocks), "blocks", at(lapses[-1].at)),
                seen("lease_s", round(lease, 1), "s", at(longest.at)),
                seen("largest_burst", burst.blocks, "blocks", at(burst.at)),
                seen("largest_burst_share", round(burst.blocks / state.usable, 4), "of the pool", at(burst.at)),
                seen(
                    "requests_under_lease", leased, "requests", at(lapses[-1].at, *(d.changed_at for d in under_lease))
                ),
            ),
            explanation=(
                f"{counted(len(requests), 'finished request')} kept {counted(len(blocks), 'block')} until their leases"
                f" of {duration(lease)} expired, because no consumer confirmed the transfers. At most"
                f" {counted(burst.blocks, 'block')} ({percent(burst.blocks / state.usable)} of the pool) became free at"
                f" once. {counted(leased, 'more finished request')} {'is' if leased == 1 else 'are'} under a lease now."
            ),
            missing="" if proven else EITHER_END,
        )

    def _recent_lapses(self, ledger: EngineLedger, settings: Settings) -> list[LapsedLease]:
        remember = settings(self.remember_s)
        recent = [lapse for lapse in ledger.lapses if ledger.age_s(lapse.at_ns) < remember]
        names_all = ledger.description.engine == "kvscope"  # what it does not name, a transfer has ended
        return [lapse for lapse in recent if lapse.named or not names_all]

    def _matters(self, ledger: EngineLedger, settings: Settings, lapses: Sequence[LapsedLease]) -> bool:
        """Return whether these are many, or kept much of the pool. Where the engine reports a lease and a transfer in
        the same way, fewer must be as sure as many, of which each was found over in a look as long as half of it.
        """
        many, least_share = settings(self.min_requests), settings(self.min_share)
        if len({lapse.id for lapse in lapses}) >= many:
            return True
        usable = ledger.state.total - ledger.state.reserved
        blocks = {block for lapse in lapses for block in lapse.blocks}
        much = bool(blocks) and len(blocks) >= least_share * usable
        return much and prod({lapse.id: lapse.chance for lapse in lapses}.values()) <= HALF_A_LEASE**many


class LeaseBurstFromCounter(FromSamples, LeaseBurst):
    """Expired leases, by the engine's own counter.

    Sees: leases on the KV of finished requests that expired before a consumer had read it.
    Likely when: always, since the counter does not show how many blocks they kept.
    Not when: of a hundred requests one or none is concerned, or two altogether: that is information.
    """

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield what the engine counted."""
        expired = counted_events(ledger.samples, "expired_leases", settings)
        if expired is None:
            return
        yield self.finding(
            ledger,
            severity=expired.severity(settings),
            since_ns=expired.since_ns(),
            position=expired.last.position,
            evidence=expired.evidence("leases"),
            case=READ_LATE if expired.last.late_reads else "",
            explanation=(
                f"The engine counted {counted(expired.number, 'expired lease')} {expired.when()}"
                f"{expired.of_requests()}: no consumer had read the KV of these finished requests, and their blocks"
                " were kept until the end of the lease. Their clients left between the two engines, or the consumer is"
                " slow or gone."
            ),
            missing="how many blocks they kept, and for how long: attach the event stream (monitor doctor"
            " tcp://HOST:5757)",
        )
