"""Codes that no scenario shows: tests have streams written by hand for them."""

from __future__ import annotations

from typing import Final

from .scenario import ShownByHand

BY_HAND: Final = (
    ShownByHand("leak.session-pinned", "the engine has no sessions"),
    ShownByHand("leak.encoder-cache", "the engine has no encoder"),
    ShownByHand("stuck.encoder-budget", "the engine has no encoder"),
    ShownByHand("stuck.rank-diverged", "one engine has no other ranks"),
    ShownByHand("harm.*", "each fault of the engine has a code of its own: tests/detectors has recordings"),
    ShownByHand("stuck.lost-request", "the engine loses none: tests/detectors and tests/probes show it"),
    ShownByHand("corrupt.conservation", "no fault breaks the sum without an impossible transition"),
    ShownByHand("sizing.block-inflated", "the engine has no hybrid models"),
    ShownByHand("sizing.refused-start", "a log shows it: no engine starts"),
    ShownByHand("sizing.smallest-worker", "the engine has one device"),
    ShownByHand("sizing.other-process", "the engine has its device to itself"),
    ShownByHand("stuck.slots-exhausted", "an audit of SGLang's shows it"),
    ShownByHand("stuck.engine-dead", "a log shows it: the engine has ended"),
    ShownByHand("stuck.outer-tier", "the log of an outer tier shows it"),
    ShownByHand("collapse.outer-hits", "the log of an outer tier shows it"),
    ShownByHand("corrupt.stale-remote-read", "the log of a KV connector shows it"),
    ShownByHand("sizing.overload", "a load shows it and no fault: the metrics of a paper engine in tests/detectors"),
    ShownByHand("imbalance.ranks", "one engine has no other ranks"),
    ShownByHand("blind.*", "they concern the observer"),
    ShownByHand("held.*", "they are no incidents"),
)
