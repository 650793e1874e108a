"""Blocks that a fence, a lease, a session, a pin or an encoder's cache keeps, and what only looks like it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest
import torch

from kvscope.engine.connectors.base import KVLoad
from kvscope.engine.connectors.host import HostConnector
from kvscope.engine.faults import Faults
from kvscope.engine.requests.request import Request, SamplingParams
from kvscope.monitor.contract.kinds import Holder, Limit, Release, Status, Tier, TierOp
from kvscope.monitor.detectors.registry import THRESHOLDS
from tests.detectors.leaks import deferred_free_stalled, encoder_cache, lease_burst
from tests.detectors.scenes import Spoken, Watched, value
from tests.engine.process import wait_for

DEFERRED_FREE_STALLED = "leak.deferred-free-stalled"
LEASE_BURST = "leak.lease-burst"
SESSION_PINNED = "leak.session-pinned"
EXTERNAL_PINS = "leak.external-pins"
ENCODER_CACHE = "leak.encoder-cache"
A_KEY = 7
A_BLOCK, NEXT_BLOCK = b"digest of block 1", b"digest of block 2"


def leaks(scene: Watched | Spoken) -> set[str]:
    """Codes of leaks that ever fired."""
    return {finding.code for finding in scene.watch.findings() if finding.code.startswith("leak.")}


# -------------------------------------------------------------------- leak.deferred-free-stalled


def test_what_was_fenced_behind_a_step_that_is_over() -> None:
    scene = deferred_free_stalled(keys=":every=2")
    affected = scene.lab.faults.on[DEFERRED_FREE_STALLED].affected
    assert len(affected) == 2
    scene.live(4)
    finding = scene.only(DEFERRED_FREE_STALLED)
    assert (finding.severity, finding.verdict, finding.missing) == ("error", "confirmed", "")
    assert sorted(finding.culprits.requests) == sorted(affected)
    held = [block for block, references in enumerate(scene.lab.pool.refs) if references and block]
    assert finding.culprits.blocks == held
    assert value(finding, "fence_step") <= scene.lab.scheduler.completed_step  # type: ignore[operator]
    assert all((finding.do_now, finding.change, finding.wont_help, finding.since))


def test_fences_that_are_taken_down_are_no_leak() -> None:
    scene = deferred_free_stalled(fault=False)
    scene.live(4)
    assert not scene.alarms()


def test_what_is_fenced_behind_a_step_that_does_not_end_is_rightly_kept() -> None:
    """However long it takes, as long as it is under way; the step is the trouble, if it is one."""
    scene = Watched()
    request = scene.lab.arrive(20, max_tokens=40)
    scene.lab.arrive(20, max_tokens=40)
    scene.steps(5)  # so few that any step may compile
    scene.launch()
    scene.lab.abort(request)
    scene.lab.flush()
    scene.look()
    assert [d.holder for d in scene.ledger.state.deferrals.values()] == [Holder.FENCE]
    scene.beat(60)
    assert not leaks(scene)
    scene.only("stuck.engine-stalled")


def test_a_fence_whose_step_was_never_launched_is_never_passed() -> None:
    scene = Spoken()
    scene.arrive(7, [3, 4])
    scene.log.finished(7, Status.FINISHED_ABORTED)
    scene.log.detached(7, [3, 4])
    scene.log.free_deferred(7, [3, 4], Holder.FENCE, fence=100)
    scene.say()
    scene.wait(1)
    assert not scene.firing()
    scene.wait(2)
    assert scene.only(DEFERRED_FREE_STALLED).culprits.blocks == [3, 4]
    scene.log.reclaimed([4, 3], Release.ABORTED)
    scene.wait(1)
    scene.wait(5)
    assert not scene.firing()


def test_who_came_later_knows_which_fences_were_passed() -> None:
    scene = deferred_free_stalled()
    scene.live(4)
    joined = Watched()
    joined.watch.fleet.engines.clear()
    joined.watch.feed([scene.lab.keyframe()])
    joined.watch.settle()
    late, early = joined.only(DEFERRED_FREE_STALLED), scene.only(DEFERRED_FREE_STALLED)
    assert (late.culprits, late.since) == (early.culprits, early.since)


def test_reclaims_that_were_lost_are_no_leak() -> None:
    """The books miss that the blocks came back; the audit puts them right before anything is made of it."""
    scene = Watched(async_scheduling=True, prefix_caching=False)
    requests = [scene.lab.arrive(20, max_tokens=100) for _ in range(2)]
    scene.steps(5)
    scene.lab.abort(requests[0])
    scene.lab.flush()
    scene.look()
    assert scene.ledger.state.deferrals
    scene.lab.step()
    scene.lab.step()
    scene.skip()
    scene.beat(5)
    assert scene.ledger.state.damaged
    assert not scene.firing(DEFERRED_FREE_STALLED)
    scene.live(3, every=0.1)
    assert not scene.ledger.state.damaged
    assert not scene.ledger.state.deferrals
    assert not leaks(scene)


# -------------------------------------------------------------------- leak.lease-burst


def test_blocks_that_only_a_lease_brings_back() -> None:
    scene = lease_burst(keys=":every=2")
    affected = scene.lab.faults.on[LEASE_BURST].affected
    tables = scene.lab.manager.tables
    kept = sorted(block for number in tables for block in scene.lab.blocks_of(number))
    assert len(tables) == len(affected) == 4
    scene.live(4)
    assert not scene.alarms()
    scene.live(3, every=0.1)
    assert not tables
    finding = scene.only(LEASE_BURST)
    assert (finding.severity, finding.verdict) == ("warning", "confirmed")
    assert sorted(finding.culprits.requests) == sorted(affected)
    assert finding.culprits.blocks == kept
    assert value(finding, "largest_burst") == len(kept)
    assert value(finding, "lease_s") == pytest.approx(5, abs=0.2)
    assert value(finding, "requests_under_lease") == 0


def test_it_is_past_when_no_lease_has_run_out_for_long() -> None:
    scene = lease_burst(settings=[f"{LEASE_BURST}.remember_s=20"])
    scene.live(10)
    firing = scene.only(LEASE_BURST)
    scene.live(25)
    assert not scene.firing(LEASE_BURST)
    assert [f.id for f in scene.watch.findings("resolved")] == [firing.id]


def test_leases_of_transfers_that_are_confirmed_are_no_leak() -> None:
    scene = lease_burst(fault=False)
    scene.live(20)
    assert not scene.alarms()


def test_a_client_or_two_that_went_away_are_what_a_lease_is_for() -> None:
    scene = lease_burst(keys=":limit=2", total=801)
    scene.live(20)
    assert len(scene.ledger.lapses) == 2
    assert not scene.firing(LEASE_BURST), "not even as information"


def test_blocks_that_several_leases_kept_became_free_once() -> None:
    scene = Watched(total=201, connector_share=1.0, lease_s=5.0, faults=(LEASE_BURST,))
    for number in range(8):
        scene.lab.arrive([*range(40), 100 + number], max_tokens=2)
    scene.run_until_idle()
    scene.live(20)
    finding = scene.only(LEASE_BURST)
    assert value(finding, "largest_burst") == len(finding.culprits.blocks)
    assert sum(len(lapse.blocks) for lapse in scene.ledger.lapses) > 2 * len(finding.culprits.blocks)


def test_one_lease_that_kept_much_of_the_pool_counts() -> None:
    scene = lease_burst(keys=":limit=1", total=101)
    scene.live(20)
    (lapse,) = scene.ledger.lapses
    finding = scene.only(LEASE_BURST)
    assert (finding.verdict, finding.culprits.requests) == ("confirmed", [lapse.id])
    assert value(finding, "largest_burst_share") == round(len(lapse.blocks) / 100, 4)


@pytest.mark.parametrize(("times_its_blocks", "counts"), [(20, True), (25, False)])
def test_one_lease_counts_from_a_twentieth_of_the_pool_on(times_its_blocks: int, counts: bool) -> None:
    (lapse,) = lapsed_lease(101).ledger.lapses
    scene = lapsed_lease(1 + times_its_blocks * len(lapse.blocks))
    assert bool(scene.firing(LEASE_BURST)) is counts


def lapsed_lease(total: int) -> Watched:
    """One lease has run out in a pool of so many blocks."""
    scene = lease_burst(keys=":limit=1", total=total)
    scene.live(20)
    return scene


@pytest.mark.parametrize(("look_before_s", "verdict"), [(1.0, "likely"), (8.0, ""), (None, "")])
def test_one_large_lease_of_an_engine_that_reports_both_ends_alike(look_before_s: float | None, verdict: str) -> None:
    """The lease takes 20 s. A look that lasts nearly half of it may have found a transfer that ended by
    itself, and an idle engine may not have looked at all.
    """
    scene, blocks = Spoken(), list(range(1, 30))
    scene.arrive(1, blocks)
    scene.log.finished(1, Status.FINISHED_LENGTH_CAPPED)
    scene.log.free_deferred(1, blocks, Holder.CONNECTOR, lease_deadline_ns=scene.clock.ns + 20_000_000_000)
    scene.say()
    scene.wait(20 - (look_before_s or 0))
    if look_before_s is not None:
        scene.log.step_launched(1, [9], [1])
        scene.wait(look_before_s)
    else:
        scene.watch.feed([scene.packer.heartbeat()])
    scene.log.completion_delivered(1)
    scene.log.released(1, blocks, Release.TRANSFER_DONE)
    scene.say()
    assert scene.ledger.lapses
    found = scene.firing(LEASE_BURST)
    assert [finding.verdict for finding in found] == [verdict] * bool(verdict)
    assert all(finding.missing for finding in found)


@pytest.mark.parametrize(("looks_s", "verdict"), [(None, ""), (8, ""), (15, "likely")])
def test_of_an_engine_that_reports_both_ends_alike_a_look_separates_them(looks_s: float | None, verdict: str) -> None:
    """A step takes as long as the lease of 20 s, and the connector is asked between steps: what ended first is unknown.

    If it still kept them when most of the lease was over, the lease is the better explanation, and no proof.
    """
    scene = Spoken()
    for number in range(3):
        scene.arrive(number, [1 + number])
        scene.log.finished(number, Status.FINISHED_LENGTH_CAPPED)
        scene.log.free_deferred(
            number, [1 + number], Holder.CONNECTOR, lease_deadline_ns=scene.clock.ns + 20_000_000_000
        )
    scene.log.step_launched(1, [9], [1])
    scene.say()
    if looks_s is not None:
        scene.wait(looks_s)
        scene.log.step_completed(1, 1000, Limit.NONE, -1, -1, -1)
        scene.log.step_launched(2, [9], [1])
    scene.wait(21 - (looks_s or 0))
    for number in range(3):
        scene.log.completion_delivered(number)
        scene.log.released(number, [1 + number], Release.TRANSFER_DONE)
    scene.say()
    found = scene.firing(LEASE_BURST)
    assert [finding.verdict for finding in found] == [verdict] * bool(verdict)
    assert all(finding.missing for finding in found)


@pytest.mark.parametrize("lease_s", [0.0, 5.0])
def test_a_leak_and_a_lease_are_told_apart(lease_s: float) -> None:
    """The same completions are dropped; with a lease the blocks come back, without one they do not."""
    scene = Watched(
        total=201, connector_share=1.0, lease_s=lease_s, prefix_caching=False, faults=["leak.finished-held"]
    )
    for tokens in range(32, 40):
        scene.lab.arrive(tokens, max_tokens=2)
    scene.run_until_idle()
    scene.live(20)
    assert leaks(scene) == {LEASE_BURST if lease_s else "leak.finished-held"}


# -------------------------------------------------------------------- leak.session-pinned


def session(blocks: list[int]) -> Spoken:
    """Request r-7 has ended a turn, and its session keeps these blocks."""
    scene = Spoken()
    scene.arrive(7, blocks)
    scene.say()
    scene.log.finished(7, Status.FINISHED_STOPPED)
    scene.log.free_deferred(7, blocks, Holder.SESSION)
    scene.say()
    return scene


def test_a_session_in_which_nobody_speaks() -> None:
    scene = session([3, 4, 5, 6])
    idle_s = scene.watch.settings(THRESHOLDS[f"{SESSION_PINNED}.idle_s"])
    scene.wait(idle_s - 1)
    assert not scene.alarms()
    scene.wait(2)
    finding = scene.only(SESSION_PINNED)
    assert (finding.severity, finding.verdict) == ("warning", "confirmed")
    assert (finding.culprits.requests, finding.culprits.blocks) == (["r-7"], [3, 4, 5, 6])
    scene.log.released(7, [6, 5, 4, 3], Release.FINISHED)
    scene.wait(1)
    scene.wait(5)
    assert [f.id for f in scene.watch.findings("resolved")] == [finding.id]


def test_a_request_that_waits_for_more_of_its_input_is_a_session_too() -> None:
    scene = Spoken()
    scene.arrive(7, [3, 4])
    scene.log.waiting_on(7, Status.WAITING_FOR_STREAMING_REQ)
    scene.say()
    scene.wait(scene.watch.settings(THRESHOLDS[f"{SESSION_PINNED}.idle_s"]) + 1)
    assert scene.only(SESSION_PINNED).culprits.blocks == [3, 4]


def session_spoken_in(times: int = 5) -> Spoken:
    scene = Spoken()
    scene.arrive(7, [3, 4])
    for _ in range(times):
        scene.log.waiting_on(7, Status.WAITING_FOR_STREAMING_REQ)
        scene.wait(200)
        scene.log.ready(7)
        scene.log.admitted(7, 8)
        scene.wait(1)
    return scene


def test_a_session_that_is_spoken_in_again_and_again_is_no_leak() -> None:
    assert not session_spoken_in().alarms()


def test_a_small_session_is_not_what_others_wait_for() -> None:
    scene = session([3])
    scene.wait(1000)
    assert not scene.firing()


# -------------------------------------------------------------------- leak.external-pins


class Host:
    """The host connector, whose words a scene takes, over KV that is all zeros."""

    def __init__(self, scene: Spoken, faults: list[str], capacity: int) -> None:
        self.connector = HostConnector(
            lambda blocks: torch.zeros(1, 1, len(blocks)),
            lambda *_: None,
            block_size=4,
            capacity=capacity,
            log=scene.log,
            faults=Faults.parse(faults),
        )
        self.scene = scene
        self._numbers = count(1)

    def asking(self, digests: list[bytes]) -> Request:
        request = Request(next(self._numbers), "r", [0] * (len(digests) * 4 + 1), SamplingParams())
        request.digests, request.num_computed_tokens = digests, request.num_tokens
        return request

    def keep(self, digests: list[bytes]) -> None:
        """A request with these blocks ends, and they are stored."""
        assert self.connector.request_finished(self.asking(digests), list(range(1, len(digests) + 2)))
        wait_for(lambda: bool(self.connector.completed()))

    def fetch(self, digests: list[bytes], *, ends: bool = True) -> int:
        """A request waits for these blocks; its number. Taken in at once if it `ends`."""
        request = self.asking(digests)
        self.scene.log.arrived(request.number, f"r-{request.number}", request.num_tokens, 1, 0, 1, 1)
        self.scene.log.waiting_on(request.number, Status.WAITING_FOR_REMOTE_KVS)
        self.connector.start_load(KVLoad(request, 0, list(range(1, len(digests) + 1))))
        if ends:
            wait_for(lambda: bool(self.connector.loaded()))
            self.scene.log.ready(request.number)
            self.scene.log.finished(request.number, Status.FINISHED_STOPPED)
        self.scene.say()
        return request.number


@contextmanager
def host(faults: list[str], capacity: int = 4) -> Iterator[tuple[Spoken, Host]]:
    scene = Spoken()
    made = Host(scene, faults, capacity)
    try:
        yield scene, made
    finally:
        made.connector.close()


def test_pins_that_outlive_their_fetch() -> None:
    with host([EXTERNAL_PINS]) as (scene, tier):
        tier.keep([A_BLOCK, NEXT_BLOCK])
        tier.fetch([A_BLOCK, NEXT_BLOCK])
        scene.wait(9)
        assert not scene.firing()
        assert [f.code for f in scene.watch.findings("pending")] == [EXTERNAL_PINS]
        scene.wait(2)
        finding = scene.only(EXTERNAL_PINS)
        assert (finding.severity, finding.verdict) == ("warning", "confirmed")
        assert value(finding, "pinned_blocks") == 2 == sum(tier.connector._pins.values())
        assert (value(finding, "tier_used"), value(finding, "tier_capacity")) == (2, 4)
        assert "HOST" in finding.explanation


def test_pins_of_a_tenth_of_the_tier_are_enough() -> None:
    with host([EXTERNAL_PINS], capacity=20) as (scene, tier):
        tier.keep([A_BLOCK, NEXT_BLOCK])
        tier.fetch([A_BLOCK, NEXT_BLOCK])
        scene.wait(11)
        assert value(scene.only(EXTERNAL_PINS), "pinned_share") == 0.1


@pytest.mark.parametrize("still", [True, False])
def test_pins_of_fetches_that_end_or_go_on_are_no_leak(still: bool) -> None:
    """A full tier that evicts nothing, and even a fetch that never ends, is not this."""
    with host([], capacity=2) as (scene, tier):
        tier.keep([A_BLOCK, NEXT_BLOCK])
        for _ in range(3):
            tier.fetch([A_BLOCK, NEXT_BLOCK])
        if still:
            tier.fetch([A_BLOCK], ends=False)
        scene.wait(60)
        assert bool(scene.ledger.state.tiers[1].pins) == still
        assert not leaks(scene)


def test_one_leaked_pin_beside_a_fetch_that_goes_on() -> None:
    with host([EXTERNAL_PINS + ":limit=1"]) as (scene, tier):
        tier.keep([A_BLOCK, NEXT_BLOCK])
        tier.fetch([A_BLOCK])
        scene.wait(1)
        tier.fetch([A_BLOCK, NEXT_BLOCK], ends=False)
        scene.wait(20)
        assert value(scene.firing(EXTERNAL_PINS)[0], "fetches_in_progress") == 1


def pinned(scene: Spoken, operation: TierOp, number: int) -> None:
    """Request `number` begins or ends to fetch the one block of the host tier."""
    if operation == TierOp.PINNED:
        scene.log.tier(TierOp.PINNED, Tier.HOST, 1, 4, [A_KEY])
        scene.log.arrived(number, f"r-{number}", 16, 8, 0, 1, 3)
        scene.log.waiting_on(number, Status.WAITING_FOR_REMOTE_KVS)
    else:
        scene.log.tier(TierOp.UNPINNED, Tier.HOST, 1, 4, [A_KEY])
        scene.log.ready(number)
    scene.say()


@pytest.mark.parametrize("unpins", [True, False])
def test_a_pin_that_a_later_fetch_shares_counts_from_the_end_of_the_first(unpins: bool) -> None:
    """Two fetches of one block overlap, each of 20 s. Either both unpin it, or the second does not."""
    scene = Spoken()
    pinned(scene, TierOp.PINNED, 1)
    scene.wait(12)
    pinned(scene, TierOp.PINNED, 2)
    scene.wait(8)
    pinned(scene, TierOp.UNPINNED, 1)
    scene.wait(12)
    assert not scene.firing(EXTERNAL_PINS)
    if unpins:
        pinned(scene, TierOp.UNPINNED, 2)
    else:
        scene.log.ready(2)
        scene.say()
    scene.wait(12)
    assert bool(scene.firing(EXTERNAL_PINS)) is not unpins


def test_of_pins_from_before_a_loss_nothing_is_said() -> None:
    """Their unpinning may be among what was lost, and no audit tells."""
    with host([EXTERNAL_PINS]) as (scene, tier):
        tier.keep([A_BLOCK, NEXT_BLOCK])
        tier.fetch([A_BLOCK, NEXT_BLOCK])
        scene.log.tick()
        scene.log.flush(-1, -1, (-1, -1, -1, -1))
        assert list(scene.packer.pack())  # lost
        scene.wait(60)
        assert scene.ledger.losses
        assert not leaks(scene)


# -------------------------------------------------------------------- leak.encoder-cache


def test_requests_that_hold_the_encoders_cache_against_one_another() -> None:
    scene = encoder_cache()
    scene.live(scene.watch.settings(THRESHOLDS[f"{ENCODER_CACHE}.grace_s"]) + 2)
    finding = scene.only(ENCODER_CACHE)
    assert (finding.severity, finding.verdict) == ("error", "likely")
    assert finding.culprits.requests == ["r-1", "r-2"]
    assert value(finding, "blocks_free") == scene.lab.pool.usable
    assert "encoder" in finding.missing
    scene.lab.log.admitted(1, 8)
    scene.lab.log.progressed([1], [8], [1])
    scene.live(5)
    assert [f.id for f in scene.watch.findings("resolved")] == [finding.id]


def test_where_others_go_on_an_item_is_too_large() -> None:
    scene = encoder_cache(others=True)
    scene.live(scene.watch.settings(THRESHOLDS[f"{ENCODER_CACHE}.grace_s"]) + 5)
    assert scene.lab.scheduler.running
    assert scene.only("stuck.encoder-budget").culprits.requests == ["r-1", "r-2"]
