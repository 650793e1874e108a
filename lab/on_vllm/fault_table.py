"""The faults of vLLM's scheduler by name: where each was reported, and which engine and load it needs.

`vllm_faults` breaks vLLM's objects by these names. Half of them and more are vLLM's own defects: the fix is undone, or
the call that the report names is patched. Some need no patch: a load alone
causes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..needed_loads import LARGE_AMONG_PREFIXES

VLLM_ISSUES: Final = "https://github.com/vllm-project/vllm/issues/"
NEWEST_RELEASE: Final = (99,)
RANDOM_MUTATION: Final = "random-mutation"
"""No defect, but any. The truth has no kind of harm for some: it is run only where it is asked for by name."""
FENCED: Final = (0, 24)
"""The first release that frees blocks behind a step in flight."""


@dataclass(frozen=True)
class VllmFault:
    """A fault. draws_like: the code of `engine.faults` whose engine and load it needs, or a load of `needed_loads`,
    empty for any.

    report: the public report of the defect, empty for one that only the lab makes. since, until: the releases that have
    the mechanism. fetches, keeps, lease, renews: what the connector and its consumers do. beyond_pool: max_model_len
    may exceed the pool. asynchronous: the engine schedules a step ahead, or not; None: as drawn. prefixes: the same of
    its prefix cache. reserves: what is admitted has room for all of its prompt. fewer_blocks: so many less than drawn.
    mixed: not for its turn only, which keeps the mixed runs of a seed as they were before it was added.
    """

    name: str
    draws_like: str = ""
    report: str = ""
    since: tuple[int, ...] = (0,)
    until: tuple[int, ...] = NEWEST_RELEASE
    fetches: bool = False
    keeps: bool = False
    lease: bool = False
    renews: bool = False
    beyond_pool: bool = False
    asynchronous: bool | None = None
    prefixes: bool | None = None
    reserves: bool = True
    fewer_blocks: int = 0
    mixed: bool = True


def release_tuple(release: str) -> tuple[int, ...]:
    """Return a release's number as a tuple that compares."""
    return tuple(int(part) for part in release.split(".")[:3] if part.isdecimal())


def _issue(number: int) -> str:
    return f"{VLLM_ISSUES}{number}"


_TABLE: Final = (
    VllmFault("sending-never-reported", "leak.finished-held", _issue(27073), keeps=True),
    VllmFault("aborted-load-never-reported", "leak.remote-load-lost", _issue(46283), fetches=True),
    VllmFault("load-never-ends", "stuck.remote-load", _issue(35943), fetches=True),
    VllmFault("idle-engine-never-polls", "leak.idle-not-polled", _issue(41180), keeps=True),
    VllmFault("consumer-gone-until-lease", "leak.lease-burst", _issue(29906), keeps=True, lease=True),
    VllmFault(
        "blocks-behind-fence", "leak.deferred-free-stalled", _issue(49675), (0, 24), fetches=True, asynchronous=True
    ),
    VllmFault("freed-twice", "", _issue(33377)),
    VllmFault("grammar-never-compiled", "stuck.grammar", _issue(45012)),
    VllmFault("load-never-promoted", "stuck.promotion-starved", _issue(53130), (0, 18), fetches=True),
    VllmFault("larger-than-pool", "stuck.never-fits", _issue(39734), beyond_pool=True),
    VllmFault("preempts-itself", "stuck.self-preempt", _issue(52520), beyond_pool=True, prefixes=False, reserves=False),
    VllmFault("chunks-admitted-without-room", "thrash.preemption", _issue(37307), (0, 19), reserves=False),
    VllmFault("zero-tokens", "", _issue(55427), asynchronous=False),
    VllmFault("heavy-head", "stuck.head-of-line", _issue(31731)),
    VllmFault("cache-flushed", LARGE_AMONG_PREFIXES, _issue(24394), prefixes=True),
    VllmFault("step-hangs", "stuck.engine-stalled", _issue(56816)),
    VllmFault("counter-drifts", "", "https://github.com/vllm-project/vllm-ascend/issues/10048"),
    VllmFault("abort-skips-free", "leak.unaccounted", "https://github.com/sgl-project/sglang/issues/6258"),
    VllmFault("ends-leave-a-block"),
    VllmFault("pins-never-dropped", "collapse.cache-flushed", _issue(35931)),
    VllmFault("lost-from-queue"),
    VllmFault("alike-requests", "collapse.lockstep"),
    VllmFault("pool-too-small", "thrash.preemption"),
    VllmFault(
        "preempts-behind-fence", "thrash.cascade", _issue(49674), (0, 24), fetches=True, asynchronous=True, mixed=False
    ),
    VllmFault(
        "loads-hold-the-pool",
        "stuck.parked-loads",
        _issue(45388),
        fetches=True,
        reserves=False,
        fewer_blocks=1,
        mixed=False,
    ),
    VllmFault("freed-in-a-full-pool", "corrupt.use-after-free", _issue(33377), mixed=False),
    VllmFault(RANDOM_MUTATION, mixed=False),
    VllmFault("consumer-stops-renewing", "leak.lease-burst", "", (0, 32), keeps=True, renews=True, mixed=False),
)
FAULT_TABLE: Final = {fault.name: fault for fault in _TABLE}
