"""Codes that no scenario shows: tests have streams written by hand for them."""

from __future__ import annotations

from typing import Final

from kvscope.monitor.incidents.scenarios.scenario import ShownByHand

BY_HAND: Final = (
    ShownByHand("leak.session-pinned", "the engine has no sessions"),
    ShownByHand("leak.encoder-cache", "the engine has no encoder"),
    ShownByHand("stuck.encoder-budget", "the engine has no encoder"),
    ShownByHand("stuck.rank-diverged", "one engine has no other ranks"),
    ShownByHand("stuck.lost-request", "the engine loses none: tests/detectors and tests/probes show it"),
    ShownByHand("sizing.block-inflated", "the engine has no hybrid models"),
    ShownByHand("blind.*", "they concern the observer"),
    ShownByHand("held.*", "they are no incidents"),
)
