"""The truth room: what happened follows from the final state alone, and a sound engine has no harm."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from kvscope.engine.faults import PLACES
from kvscope.lab.truth.claims import CLAIMS, HARM_CLAIMS, codes_named, harms_behind
from kvscope.lab.truth.episode_end import EpisodeEnd, KeptBlocks, ObservedWaste, UnfinishedRequest, WasteKind
from kvscope.lab.truth.what_happened import decide
from kvscope.lab.waste_log import WasteLog
from kvscope.monitor.detectors.registry import CATALOGUE

SOUND = EpisodeEnd(
    watched_s=100,
    drained_s=50,
    busy_s=90,
    steps=1000,
    short_steps=500,
    usable_blocks=100,
    asked=10,
    tokens_computed=1000,
    request_s=500,
)


def end(**changed: object) -> EpisodeEnd:
    return msgspec.structs.replace(SOUND, **changed)


def test_a_sound_engine_has_no_harm() -> None:
    assert decide(SOUND) == []


@pytest.mark.parametrize(
    ("request_left", "kind"),
    [
        (UnfinishedRequest("r", "front-end", 5.0), "never-reaches-the-scheduler"),
        (UnfinishedRequest("r", "ready", 5.0), "ready-and-not-queued"),
        (UnfinishedRequest("r", "grammar", 5.0), "grammar-not-taken"),
        (UnfinishedRequest("r", "remote", 5.0, [1, 2]), "fetch-never-ends"),
        (UnfinishedRequest("r", "remote", 5.0, [1, 2], kv_arrived=True), "fetched-and-not-taken"),
        (UnfinishedRequest("r", "running", 5.0, [1]), "runs-without-tokens"),
        (UnfinishedRequest("r", "running", 5.0, [1], preempted=2), "preempts-itself"),
        (UnfinishedRequest("r", "waiting", 5.0, needs_blocks=101), "needs-more-than-the-pool"),
        (UnfinishedRequest("r", "waiting", 5.0, needs_blocks=100), "waits-behind-another"),
        (UnfinishedRequest("r", "waiting", 5.0, [1, 2], needs_blocks=9), "waits-with-blocks"),
        (UnfinishedRequest("r", "waiting", 5.0, preempted=2, arrived_s=1.0, prompt_blocks=100), "preempts-itself"),
        (
            UnfinishedRequest("r", "waiting", 120.0, preempted=2, arrived_s=5.0, prompt_blocks=101),
            "needs-more-than-the-pool",
        ),
    ],
)
def test_why_a_request_never_finishes(request_left: UnfinishedRequest, kind: str) -> None:
    (harm,) = decide(end(unfinished=[request_left]))
    assert (harm.kind, harm.since_s, harm.size, harm.requests) == (kind, 5.0, 0.1, {"r"})
    assert harm.blocks == set(request_left.blocks)


@pytest.mark.parametrize(
    ("kept", "polled", "kind"),
    [
        (KeptBlocks("connector", [3], 5.0, "r"), True, "kept-by-connector"),
        (KeptBlocks("connector", [3], 5.0, "r"), False, "kept-unpolled"),
        (KeptBlocks("fetch", [3], 5.0, "r"), True, "kept-by-fetch"),
        (KeptBlocks("pin", [3], 5.0), True, "pinned-for-good"),
        (KeptBlocks("nothing", [3], 5.0, "r", "completed"), True, "lost-at-end"),
        (KeptBlocks("nothing", [3], 5.0, "r", "aborted"), True, "lost-at-abort"),
        (KeptBlocks("nothing", [3], 5.0, "r", "fence"), True, "lost-behind-fence"),
    ],
)
def test_why_a_block_is_never_freed(kept: KeptBlocks, polled: bool, kind: str) -> None:
    (harm,) = decide(end(kept=[kept], polled=polled))
    assert (harm.kind, harm.size, harm.blocks) == (kind, 0.01, {3})


def test_an_engine_that_hangs_is_one_harm_and_its_connector_has_none() -> None:
    waiting = [UnfinishedRequest("a", "running", 7.0), UnfinishedRequest("b", "waiting", 8.0)]
    kept = [KeptBlocks("connector", [3], 5.0, "r"), KeptBlocks("nothing", [4], 6.0, "r", "aborted")]
    kept.append(KeptBlocks("nothing", [5], 6.5, "s", "fence", step_in_flight=True))
    lost, hang = decide(end(hangs_since_s=7.5, unfinished=waiting, kept=kept))
    assert (lost.kind, hang.kind, hang.since_s, hang.requests) == ("lost-at-abort", "engine-hangs", 7.5, {"a", "b"})


def test_blocks_behind_a_step_that_had_ended_before_a_hang_are_no_effect_of_it() -> None:
    kept = [KeptBlocks("nothing", [5], 6.5, "s", "fence"), KeptBlocks("nothing", [6], 7.0, "t", "fence", True)]
    lost, hang = decide(end(hangs_since_s=7.5, unfinished=[UnfinishedRequest("a", "running", 7.0)], kept=kept))
    assert (lost.kind, lost.since_s, lost.blocks, hang.kind) == ("lost-behind-fence", 6.5, {5}, "engine-hangs")


def test_what_the_pass_that_failed_had_taken_is_not_lost_and_what_was_owed_before_is() -> None:
    kept = [KeptBlocks("nothing", [5, 6], 0.0), KeptBlocks("nothing", [7], 4.0, "r", "aborted")]
    (lost,) = decide(end(failure="AssertionError in get_new_blocks", kept=kept))
    assert (lost.kind, lost.blocks) == ("lost-at-abort", {7})
    assert decide(end(kept=kept))[0].blocks == {5, 6, 7}


def test_what_begins_after_the_watched_part_is_no_harm_of_it() -> None:
    late = UnfinishedRequest("r", "running", 101.0)
    assert decide(end(unfinished=[late])) == []


def test_wasted_work_is_measured_in_its_own_unit_and_the_smallest_counts() -> None:
    tokens = ObservedWaste("recomputed-after-preemption", 1.0, 9.0, 1.0, ["r"])
    waits = ObservedWaste("head-of-line", 2.0, 9.0, 5.0, ["h"])
    assert [(harm.kind, harm.size) for harm in decide(end(observed=[tokens, waits]))] == [
        ("recomputed-after-preemption", 0.001),
        ("head-of-line", 0.01),
    ]


def test_every_kind_has_a_claim_and_every_code_of_a_claim_is_in_the_catalogue() -> None:
    assert set(get_args(WasteKind)) <= CLAIMS.keys()
    codes = {code for claim in CLAIMS.values() for code in (claim.named_by, *claim.also) if code}
    assert codes <= CATALOGUE.keys()
    assert {claim.named_by for claim in CLAIMS.values()} >= PLACES.keys()


def test_a_harm_is_named_by_one_code_and_bears_others_out() -> None:
    harms = decide(end(kept=[KeptBlocks("nothing", [3], 5.0, "r", "fence")]))
    assert list(codes_named(harms)) == ["leak.deferred-free-stalled"]
    assert harms_behind("leak.unaccounted", harms) == harms
    assert harms_behind("leak.finished-held", harms) == []


def test_what_happened_bears_out_the_harm_that_it_does_and_no_other() -> None:
    assert HARM_CLAIMS.keys() <= CLAIMS.keys()
    wave = decide(end(observed=[ObservedWaste("ended-together", 5.0, 9.0, 4)]))
    kept = decide(end(kept=[KeptBlocks("nothing", [3], 5.0, "r", "fence")]))
    assert harms_behind("harm.held-blocks", kept) == kept
    assert harms_behind("harm.overtaken", kept) == harms_behind("harm.held-blocks", wave) == []


def test_a_wave_is_in_lockstep_and_a_step_without_next_tokens_alone_is_not() -> None:
    wave, starved = (
        decide(end(observed=[ObservedWaste(k, 5.0, 9.0, 4)])) for k in ("ended-together", "decode-starved")
    )
    assert list(codes_named(wave)) == ["collapse.lockstep"]
    assert harms_behind("collapse.lockstep", wave) == wave
    assert harms_behind("collapse.lockstep", starved) == []


def test_room_in_blocks_that_are_not_filled_bears_out_their_size() -> None:
    harms = decide(end(observed=[ObservedWaste("queued-for-unfilled-blocks", 5.0, 9.0, 4)]))
    assert harms_behind("sizing.block-inflated", harms) == harms
    queued = decide(end(observed=[ObservedWaste("queued-for-blocks", 5.0, 9.0, 4)]))
    assert harms_behind("sizing.block-inflated", queued) == []


def test_the_final_state_travels_as_bytes() -> None:
    whole = end(unfinished=[UnfinishedRequest("r", "ready", 5.0)], kept=[KeptBlocks("fetch", [3], 5.0)])
    assert msgspec.json.decode(msgspec.json.encode(whole), type=EpisodeEnd) == whole


def test_a_request_that_needs_what_is_kept_has_no_room_left() -> None:
    waits = UnfinishedRequest("r", "waiting", 5.0, needs_blocks=60)
    kept = KeptBlocks("connector", list(range(50)), 4.0, "s")
    kinds = {harm.kind for harm in decide(end(unfinished=[waits], kept=[kept]))}
    assert kinds == {"kept-by-connector", "needs-more-than-is-left"}
    fits = msgspec.structs.replace(waits, needs_blocks=50)
    assert "waits-behind-another" in {harm.kind for harm in decide(end(unfinished=[fits], kept=[kept]))}


def test_a_hold_that_only_its_lease_ends_counts_from_the_request_s_end_even_in_the_drain() -> None:
    waste = WasteLog()
    waste.closed = True
    waste.add("freed-by-lease", 110.0, 3, ["r"], [1, 2, 3])
    waste.add_even_late("kept-until-lease", 90.0, 3, ["r"], [1, 2, 3])
    waste.add_even_late("kept-until-lease", 95.0, 1, ["s"], [4])
    (harm,) = decide(end(observed=waste.all()))
    assert (harm.kind, harm.since_s, harm.size, harm.requests) == ("kept-until-lease", 90.0, 0.04, {"r", "s"})
    assert harms_behind("leak.finished-held", [harm])
    assert not harms_behind("leak.lease-burst", [harm])
