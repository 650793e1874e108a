"""Collapses: falls from full to nothing."""

from __future__ import annotations

from typing import Final

from ..client_load import Clients
from ..simulated_run import affected, among, anybody, at_once, exactly, finished, missed_again, preempted, triggers
from .scenario import Way, incident
from .shapes import AHEAD, CHAT, FINE, GROWING, MEDIUM, NO_PREFIXES, PRIORITY, SMALL, TIGHT, TIGHT_FINE

WAVES: Final = (Clients(at_once=8, prompt=(800, 800), output=(60, 60), until_s=30),)
BEGINNING: Final = Clients("s", rate=3, until_s=20, prompt=(5, 15), output=(5, 15), prefixes=2, prefix=320)
OTHERS: Final = Clients("o", rate=1, until_s=30, prompt=(300, 400), output=(5, 10))


COLLAPSE: Final = (
    *incident(
        "collapse.lockstep",
        Way("bare", {**SMALL, **NO_PREFIXES, "num_gpu_blocks_override": 481, "max_num_batched_tokens": 128}, WAVES),
        Way("hits", {**SMALL, "num_gpu_blocks_override": 501}, WAVES),
        Way(
            "fine",
            {**FINE, "num_gpu_blocks_override": 1401, "max_num_batched_tokens": 64},
            (Clients(at_once=10, prompt=(480, 480), output=(50, 50), until_s=30),),
        ),
        onset=at_once("finished", 4),
        requests=among(finished(4)),
    ),
    *incident(
        "collapse.preempt-all",
        Way("bare", {**TIGHT, **NO_PREFIXES}, GROWING),
        Way("hits", TIGHT, GROWING, ":every=2"),
        Way("fine", TIGHT_FINE, GROWING),
        onset=at_once("preempted", 4),
        requests=exactly(preempted(4)),
    ),
    *incident(
        "collapse.prefix-hits",
        Way("all", MEDIUM, (BEGINNING,)),
        Way("half, ahead", {**MEDIUM, **AHEAD}, (BEGINNING,), ":every=2"),
        Way("later, beside others", {**MEDIUM, **PRIORITY}, (BEGINNING, CHAT), ":after=10"),
        onset=triggers(3),
        requests=among(affected),
    ),
    *incident(
        "collapse.cache-flushed",
        Way("all", MEDIUM, (BEGINNING, OTHERS)),
        Way(
            "half", MEDIUM, (BEGINNING, Clients("o", rate=2, until_s=30, prompt=(200, 300), output=(5, 10))), ":every=2"
        ),
        Way(
            "ahead", {**MEDIUM, **AHEAD}, (BEGINNING, Clients("o", rate=3, until_s=30, prompt=(60, 90), output=(5, 10)))
        ),
        onset=missed_again(prefix=320, beginnings=2, times=2),
        requests=among(anybody),
    ),
)
