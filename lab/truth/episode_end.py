"""The final state of an episode as plain data: what an engine under test hands to the lab besides its recording.

An episode has two parts. While it is *watched*, clients come and go and the engine's events are recorded. Then it is
*drained*: no new requests arrive, no client leaves, and the engine runs on until everything that can finish has
finished and everything that can be freed is free. Faults stay on. Anything left then is left for ever.

Times are seconds of the episode's clock since it began. An engine in another process sends the encoded struct.
"""

from __future__ import annotations

from typing import Literal

import msgspec

WaitPlace = Literal["front-end", "waiting", "ready", "grammar", "remote", "running", "lost"]
"""Where an unfinished request is after the drain. front-end: submitted, and the scheduler does not know it. ready: its
wait for something outside is over, and it is in no queue. remote: it waits for KV from outside.
lost: the scheduler knows it, and none of its queues has it.
"""
KeptBy = Literal["connector", "fetch", "pin", "nothing"]
"""connector: the connector has not released a finished request. fetch: a fetch of an ended request has not ended.
pin: something other than a request took a reference and never drops it.
nothing: no table, connector or fence has the reference.
"""
FreedBy = Literal["", "completed", "aborted", "preempted", "fence"]
"""How the last owner should have freed a block: at its end, or behind a step in flight."""
WasteKind = Literal[
    "recomputed-after-preemption",
    "preempted-in-vain",
    "preempted-for-itself",
    "preempted-behind-fence",
    "preempted-all",
    "capped-after-preemption",
    "head-of-line",
    "queued-for-blocks",
    "queued-for-unfilled-blocks",
    "decode-starved",
    "ended-together",
    "prefix-missed",
    "prefix-flushed",
    "prefix-evicted",
    "freed-by-lease",
    "kept-until-lease",
    "sent-while-asleep",
    "fetched-while-asleep",
    "fetched-and-passed-over",
    "outer-pin",
    "freed-twice",
    "handed-out-in-use",
    "fence-broken",
    "counters-differ",
    "pool-smaller-than-planned",
    "graphs-outgrew",
    "graphs-overreserved",
    "advice-wrong",
    "memory-unnamed",
]
"""Kinds of waste seen in the engine's own objects while the episode was watched, and over when it ends."""


class UnfinishedRequest(msgspec.Struct, frozen=True):
    """A request that has not finished after the drain.

    since_s: when it last got a token, or when what it waits for was there. needs_blocks: for all of its tokens.
    kv_arrived: what it waits for was delivered to the connector. preempted: how often in the drain. arrived_s,
    prompt_blocks: when it came, and what its prompt alone needs, 0 if unknown.
    """

    id: str
    place: WaitPlace
    since_s: float
    blocks: list[int] = []
    needs_blocks: int = 0
    kv_arrived: bool = False
    preempted: int = 0
    arrived_s: float = 0.0
    prompt_blocks: int = 0


class KeptBlocks(msgspec.Struct, frozen=True):
    """Blocks that are still referenced after the drain though their owner has ended. owner is empty if unknown.

    step_in_flight: the step that they are fenced behind has not returned, so that the engine rightly keeps them.
    """

    by: KeptBy
    blocks: list[int]
    since_s: float
    owner: str = ""
    freed_by: FreedBy = ""
    step_in_flight: bool = False


class ObservedWaste(msgspec.Struct):
    """The observed waste of one kind: first and last time, how much (in the kind's unit), which requests and blocks.

    Units: tokens for recomputed, in-vain, missed and flushed. Request-seconds for head-of-line, both queued, capped,
    starved, fetched-while-asleep and fetched-and-passed-over. Bytes for memory. A count for the rest.
    """

    kind: WasteKind
    first_s: float
    last_s: float
    amount: float = 0.0
    requests: list[str] = []
    blocks: list[int] = []


class EpisodeEnd(msgspec.Struct):
    """An engine at the end of an episode.

    busy_s: watched seconds in which a request ran or waited. request_s: seconds of all requests in the engine, added
    up. polled: whether the connector was asked in the drain, if it had anything to report. hangs_since_s: start of a
    step that never returned. failure: why the engine ended itself. mutation: what a drawn
    change of behaviour does. lost_batches: recorded batches that were dropped.
    """

    watched_s: float
    drained_s: float
    busy_s: float
    steps: int
    short_steps: int
    usable_blocks: int
    asked: int
    tokens_computed: int
    request_s: float
    device_bytes: int = 0
    polled: bool = True
    hangs_since_s: float | None = None
    failed_s: float | None = None
    failure: str = ""
    mutation: str = ""
    lost_batches: int = 0
    unfinished: list[UnfinishedRequest] = []
    kept: list[KeptBlocks] = []
    observed: list[ObservedWaste] = []
