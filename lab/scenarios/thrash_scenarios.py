"""Work that is done, thrown away and done again."""

from __future__ import annotations

from typing import Final

from ..client_load import Clients
from ..simulated_run import among, anybody, at_once, exactly, preempted, without_output
from .scenario import Way, incident
from .shapes import AHEAD, GROWING, NO_PREFIXES, TIGHT, TIGHT_FINE

LONG_PROMPTS: Final = (Clients(at_once=8, prompt=(300, 500), output=(4, 10)),)
THEN_MANY: Final = (
    Clients("first", at_once=16, prompt=(10, 20), output=(10, 20), until_s=10),
    Clients("long", times=(10.0,) * 10, prompt=(20, 30), output=(60, 90)),
    Clients("many", at_once=24, prompt=(10, 20), output=(10, 20), since_s=16, until_s=55),
)

THRASH: Final = (
    *incident(
        "thrash.preemption",
        Way("bare", {**TIGHT, **NO_PREFIXES}, LONG_PROMPTS),
        Way("half", TIGHT, LONG_PROMPTS, ":every=2"),
        Way("fine", {**TIGHT_FINE, **NO_PREFIXES, "max_num_batched_tokens": 64}, LONG_PROMPTS),
        onset=lambda simulated: len(simulated.without_output) >= 4,
        requests=exactly(without_output),
    ),
    *incident(
        "thrash.cascade",
        Way("bare", {**TIGHT, **AHEAD, **NO_PREFIXES}, GROWING),
        Way("hits", {**TIGHT, **AHEAD}, GROWING, ":after=1"),
        Way("fine", {**TIGHT_FINE, **AHEAD}, GROWING),
        onset=at_once("preempted", 3),
        requests=exactly(preempted(3)),
    ),
    *incident(
        "thrash.after-retract",
        Way("hits", TIGHT, THEN_MANY),
        Way("bare", {**TIGHT, **NO_PREFIXES}, THEN_MANY),
        Way("fine", TIGHT_FINE, THEN_MANY),
        seconds=60,
        grace=("thrash.after-retract.quiet_s",),
        requests=among(anybody),
    ),
)
