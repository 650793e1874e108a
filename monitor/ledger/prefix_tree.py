"""The prefix cache as a forest: which prefixes are kept, who shares them, what was evicted and for which request.

The stream names each cached block by a keyed hash of all tokens up to its end. It does not give the order of blocks. A
request's block table does: a block's parent is the block before it in a table that it was cached in. So a fold of the
batches learns the parents. It knows what the pool holds now and what the latest evictions took, so its size follows the
pool and not how much was folded.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from ..base.text import timestamp
from ..contract.kinds import Evict, Kind, Release, name_of
from ..contract.wire import Batch, Run
from .engine_ledger import EngineLedger, Position
from .event_history import request_names, scan_events

MAX_TREE_NODES: Final = 500
MAX_PREFIX_HOLDERS: Final = 20
MAX_TREE_IDS: Final = 100
MAX_TREE_EVICTIONS: Final = 200
MOST_EVICTED: Final = 1 << 16
"""Blocks of the evictions that are kept: only of these it is counted whether they are needed again."""
_SHORT: Final = 12
_FOLDED: Final = frozenset(
    int(kind)
    for kind in (
        Kind.ALLOCATED,
        Kind.REUSED,
        Kind.CACHED,
        Kind.EVICTED,
        Kind.RELEASED,
        Kind.DETACHED,
    )
)


class PrefixNode(msgspec.Struct, frozen=True):
    """A segment of a prefix: consecutive blocks that every holder has together. `id` and `parent` are the keyed hashes
    of their last blocks, shortened. A parent of "" is the beginning of a prompt, or not known.

    references   how many times requests have it now; `holders` names the first of them
    hits         how often it was found in the cache, as far as the events are kept
    age_s        since it was computed; None where that is longer ago than events are kept
    idle_s       for how long no request has had it, None while one has
    """

    id: str
    parent: str
    blocks: int
    tokens: int
    references: int
    hits: int
    age_s: float | None
    idle_s: float | None
    holders: list[str]
    ids: list[int]


class EvictionView(msgspec.Struct, frozen=True):
    """Cached blocks that lost their content, by one event: to make room for a request (`by`), or for a `cause` of its
    own. `needed_again`: of them, cached again since.
    """

    at: str | None
    position: str
    by: str
    cause: str
    blocks: int
    needed_again: int


class PrefixCacheView(msgspec.Struct, frozen=True):
    """The prefix cache of one engine: a forest of prefixes, the parents first. `left_out` counts the nodes that are not
    in it because there are too many: the smallest. Evictions are the latest first.
    """

    engine: str
    at: str | None
    block_size: int
    cached_blocks: int
    idle_blocks: int
    shared_blocks: int
    hit_rate: float | None
    nodes: list[PrefixNode]
    left_out: int
    evictions: list[EvictionView]


class Eviction:
    """Blocks that lost their content by one event."""

    def __init__(self, position: Position, at_ns: int, by: int, cause: str, hashes: list[int], blocks: int) -> None:
        self.position = position
        self.at_ns = at_ns
        self.by = by
        self.cause = cause
        self.hashes = hashes
        """Of the contents, as far as they are known."""
        self.blocks = blocks
        self.needed_again = 0


class Prefixes:
    """Prefixes as folded from the batches. Hashes are those of the stream, of contents that a block has now."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}
        """A hash that is not in it is the beginning of a prompt, or what is before it is not known."""
        self.hits: Counter[int] = Counter()
        self.cached_ns: dict[int, int] = {}
        self.evictions: deque[Eviction] = deque()
        self._hash_of: dict[int, int] = {}
        self._copies: Counter[int] = Counter()
        """By hash, the number of blocks with that content."""
        self._tables: dict[tuple[int, int], list[int]] = {}
        """By request and KV group, the blocks it has had in order, including those that left the window."""
        self._next: dict[tuple[int, int], int] = {}
        """The place in it of the block that is full next."""
        self._gone: dict[int, Eviction] = {}
        """By hash, of `evictions` the one that took it."""

    def fold(self, batches: Iterable[Batch]) -> None:
        """Fold the batches that follow."""
        for position, at_ns, event in scan_events(batches, None, _FOLDED):
            self._fold(event, position, at_ns)

    def _fold(self, event: Run, position: Position, at_ns: int) -> None:
        key = (event.request, event.group)
        match event.kind:
            case Kind.ALLOCATED:
                self._tables.setdefault(key, []).extend(event.ids)
                for block in event.ids:
                    self._lost(block)
                if event.args:
                    hashes = list(event.args)
                    self._evicted(Eviction(position, at_ns, event.request, "ALLOCATED", hashes, len(hashes)))
            case Kind.REUSED:
                self._tables.setdefault(key, []).extend(event.ids)
                self._next[key] = len(self._tables[key])
                self.hits.update(self._hash_of[block] for block in event.ids if block in self._hash_of)
            case Kind.CACHED:
                self._cached(key, event, at_ns)
            case Kind.EVICTED:
                hashes = [value for block in event.ids if (value := self._lost(block))]
                cause = name_of(Evict, event.args[0])
                self._evicted(Eviction(position, at_ns, -1, cause, hashes, len(event.ids)))
            case Kind.RELEASED | Kind.DETACHED:
                if event.kind == Kind.DETACHED or event.args[0] != Release.OUT_OF_WINDOW:
                    self._given_back(key, event.ids)

    def _cached(self, key: tuple[int, int], event: Run, at_ns: int) -> None:
        table = self._tables.get(key, [])
        place = self._next.get(key, 0)
        for block, value in zip(event.ids, event.args, strict=False):
            if self._hash_of.get(block) != value:
                self._lost(block)
                self._hash_of[block] = value
                self._copies[value] += 1
            if place >= len(table) or table[place] != block:
                place = table.index(block) if block in table else -1
            if place > 0 and (parent := self._hash_of.get(table[place - 1])) is not None:
                self.parents[value] = parent
            self.cached_ns.setdefault(value, at_ns)
            eviction = self._gone.pop(value, None)
            if eviction is not None:
                eviction.needed_again += 1
            place += 1
        self._next[key] = max(place, 0)

    def _lost(self, block: int) -> int:
        """Forget the content of a block, and what is known of it if no other block has it. Return its hash, or 0."""
        value = self._hash_of.pop(block, 0)
        if value:
            self._copies[value] -= 1
            if not self._copies[value]:
                for known in (self._copies, self.parents, self.hits, self.cached_ns):
                    known.pop(value, None)
        return value

    def _evicted(self, eviction: Eviction) -> None:
        self.evictions.append(eviction)
        for value in eviction.hashes:
            self._gone[value] = eviction
        while len(self.evictions) > MAX_TREE_EVICTIONS or (len(self._gone) > MOST_EVICTED and len(self.evictions) > 1):
            oldest = self.evictions.popleft()
            for value in oldest.hashes:
                if self._gone.get(value) is oldest:
                    del self._gone[value]

    def _given_back(self, key: tuple[int, int], blocks: list[int]) -> None:
        table = self._tables.get(key)
        if table is None:
            return
        gone = set(blocks)
        left = [block for block in table if block not in gone]
        if left:
            self._tables[key] = left
            self._next[key] = min(self._next.get(key, 0), len(left))
        else:
            del self._tables[key]
            self._next.pop(key, None)


class _KeptPrefix:
    """One cached content: its blocks (alike prompts that arrive together have one each) and their owners."""

    __slots__ = ("blocks", "children", "owners", "references")

    def __init__(self, block: int) -> None:
        self.blocks = [block]
        self.owners = _NO_OWNER
        self.references = 0
        self.children = _NO_CHILDREN


_NO_OWNER: Final[frozenset[int]] = frozenset()
_NO_CHILDREN: Final[Sequence[int]] = ()
"""Shared by the many that have none: there may be a hundred thousand."""


class _PrefixRun(NamedTuple):
    """Contents that follow each other, and the number of the stretch that they go on from (-1: none)."""

    values: list[int]
    above: int


def prefixes(ledger: EngineLedger, folded: Prefixes) -> PrefixCacheView:
    """Return the forest at the ledger's position, up to which `folded` has been folded. O(blocks)."""
    state = ledger.state
    kept = _kept(ledger)
    runs = _prefix_runs(kept, _parents(ledger, folded), folded)
    weights = [len(run.values) for run in runs]
    for number in range(len(runs) - 1, -1, -1):  # those above stand first
        if runs[number].above >= 0:
            weights[runs[number].above] += weights[number]
    shown = sorted(sorted(range(len(runs)), key=lambda number: -weights[number])[:MAX_TREE_NODES])
    names = request_names(ledger)
    totals = state.totals
    return PrefixCacheView(
        engine=ledger.engine,
        at=timestamp(ledger.now_ns),
        block_size=state.block_size,
        cached_blocks=sum(map(bool, state.hashes)),
        idle_blocks=state.cached_idle,
        shared_blocks=sum(references > 1 for references in state.refs),
        hit_rate=totals.hit_tokens / totals.looked_up_tokens if totals.looked_up_tokens else None,
        nodes=[_node(ledger, folded, kept, runs, number, names) for number in shown],
        left_out=len(runs) - len(shown),
        evictions=[_eviction_view(eviction, names) for eviction in reversed(folded.evictions)],
    )


def by_branch(ledger: EngineLedger, folded: Prefixes, most: int) -> list[tuple[str, list[int]]]:
    """Return the blocks of each branch with all its descendants, by the id of its first segment: the largest first.

    A prefix that all prompts share would be all there is: as long as there are fewer than `most` branches, the largest
    that forks is divided into what its prompts share and what goes on from there.
    """
    kept = _kept(ledger)
    runs = _prefix_runs(kept, _parents(ledger, folded), folded)
    own = [[block for value in run.values for block in kept[value].blocks] for run in runs]
    children: dict[int, list[int]] = {}
    sizes = [len(blocks) for blocks in own]
    for number, run in reversed(list(enumerate(runs))):  # those above stand first
        children.setdefault(run.above, []).append(number)
        if run.above >= 0:
            sizes[run.above] += sizes[number]
    starts = set(children.get(-1, []))
    undivided = [(-sizes[number], number) for number in starts]
    heapq.heapify(undivided)
    while undivided and len(starts) < most:
        fork = heapq.heappop(undivided)[1]
        while len(children.get(fork, [])) == 1:
            fork = children[fork][0]
        for number in children.get(fork, []):
            starts.add(number)
            heapq.heappush(undivided, (-sizes[number], number))
    start = list(range(len(runs)))
    blocks: dict[int, list[int]] = {}
    for number, run in enumerate(runs):
        if number not in starts:
            start[number] = start[run.above]
        blocks.setdefault(start[number], []).extend(own[number])
    named = [(_short(runs[number].values[-1]), of_branch) for number, of_branch in blocks.items()]
    return sorted(named, key=lambda one: -len(one[1]))


def _kept(ledger: EngineLedger) -> dict[int, _KeptPrefix]:
    """Return the cached contents by hash."""
    state = ledger.state
    kept: dict[int, _KeptPrefix] = {}
    for block, value in enumerate(state.hashes):
        if value:
            one = kept.get(value)
            if one is None:
                one = kept[value] = _KeptPrefix(block)
            else:
                one.blocks.append(block)
            if state.refs[block] > 0:
                one.references += state.refs[block]
                one.owners = one.owners.union(state.owners(block))
    return kept


def _parents(ledger: EngineLedger, folded: Prefixes) -> dict[int, int]:
    """Return the parents that `folded` has, and those that the tables of live requests show. Those of several
    KV groups are not in order.
    """
    parents = dict(folded.parents)
    if len(ledger.description.groups) <= 1:
        hashes = ledger.state.hashes
        for record in ledger.state.requests.values():
            for before, block in pairwise(record.blocks):
                if hashes[before] and hashes[block]:
                    parents.setdefault(hashes[block], hashes[before])
    return parents


def _prefix_runs(kept: dict[int, _KeptPrefix], parents: dict[int, int], folded: Prefixes) -> list[_PrefixRun]:
    """Return all cached contents as stretches, each after the one that it continues."""
    roots = []
    for value in kept:
        parent = kept.get(parents.get(value, 0))
        if parent is None:
            roots.append(value)
        elif isinstance(parent.children, list):
            parent.children.append(value)
        else:
            parent.children = [value]
    runs: list[_PrefixRun] = []
    todo = [(root, -1) for root in reversed(roots)]
    while todo:
        value, above = todo.pop()
        values = [value]
        while len(kept[value].children) == 1 and _alike(kept, folded, value, kept[value].children[0]):
            value = kept[value].children[0]
            values.append(value)
        todo += [(child, len(runs)) for child in kept[value].children]
        runs.append(_PrefixRun(values, above))
    return runs


def _alike(kept: dict[int, _KeptPrefix], folded: Prefixes, value: int, child: int) -> bool:
    """Whether the same requests have both, and they were hit as often."""
    one, other = kept[value], kept[child]
    return (one.references, one.owners, folded.hits[value]) == (
        other.references,
        other.owners,
        folded.hits[child],
    )


def _node(
    ledger: EngineLedger,
    folded: Prefixes,
    kept: dict[int, _KeptPrefix],
    runs: list[_PrefixRun],
    number: int,
    names: Mapping[int, str],
) -> PrefixNode:
    state = ledger.state
    values, above = runs[number]
    blocks = [block for value in values for block in kept[value].blocks]
    first, last = kept[values[0]], kept[values[-1]]
    born_ns = folded.cached_ns.get(values[0], 0)
    idle_ns = max(state.since[block] for block in last.blocks)
    return PrefixNode(
        id=_short(values[-1]),
        parent=_short(runs[above].values[-1]) if above >= 0 else "",
        blocks=len(blocks),
        tokens=len(values) * state.block_size,
        references=first.references,
        hits=folded.hits[values[0]],
        age_s=round((ledger.now_ns - born_ns) / 1e9, 3) if born_ns else None,
        idle_s=None if last.references else round(ledger.age_s(idle_ns), 3),
        holders=[names.get(owner, f"#{owner}") for owner in sorted(first.owners)[:MAX_PREFIX_HOLDERS]],
        ids=blocks[:MAX_TREE_IDS],
    )


def _eviction_view(eviction: Eviction, names: Mapping[int, str]) -> EvictionView:
    return EvictionView(
        at=timestamp(eviction.at_ns),
        position=str(eviction.position),
        by=names.get(eviction.by, f"#{eviction.by}") if eviction.by >= 0 else "",
        cause=eviction.cause,
        blocks=eviction.blocks,
        needed_again=eviction.needed_again,
    )


def _short(value: int) -> str:
    return f"{value & 0xFFFF_FFFF_FFFF_FFFF:016x}"[:_SHORT]
