"""What a prefix cache held and lost, from the raw events, and which lookups should have found more than they did."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import NamedTuple

from kvscope.monitor.contract.wire import Run

from .raw_account import RawAccount

Content = tuple[int, int]
"""A KV group and the hash of a prefix."""


class Evicted(NamedTuple):
    """The latest eviction of some content: the how many-th of all, by whom, and if empty blocks would have done."""

    nth: int
    by: int
    needless: bool


class CacheLoss(NamedTuple):
    """Tokens that a request computed though the cache held them, or had held them before."""

    kind: str
    at_s: float
    request: int
    tokens: int


class Lookup:
    """A lookup, and what became of the blocks that it did not find, by their place in the prompt."""

    def __init__(self, account: RawAccount, number: int, tokens: int, hit: int, at: int, evictions: int) -> None:
        request = account.requests[number]
        self.at_s, self.at, self.evictions = account.now_s, at, evictions
        self.first, self.last = hit, (tokens - 1) // account.block_size
        self.blocks, self.preempted = account.needs(request), bool(request.preempted_s)
        self.missed: dict[int, set[int]] = defaultdict(set)
        """By place, the groups that had its content."""
        self.gone: dict[int, list[Evicted]] = defaultdict(list)

    def leading(self, places: set[int]) -> list[int]:
        """Return those of the places that follow the hit without a gap."""
        end = self.first
        while end in places:
            end += 1
        return [*range(self.first, end)]


class CacheMemory:
    """Follows `account`, whose events it is given before they are applied."""

    def __init__(self, account: RawAccount) -> None:
        self._account = account
        self._now = 0
        self._since: dict[Content, list[tuple[int, int]]] = defaultdict(list)
        """By content: from when to when, counted in events of the cache, a block held it."""
        self._holders: dict[Content, set[int]] = defaultdict(set)
        self._entered: dict[Content, int] = {}
        self._latest: dict[Content, Evicted] = {}
        self._evictions = 0
        self._by: dict[int, list[int]] = defaultdict(list)
        """By request: which evictions of all it made."""
        self._began: dict[int, tuple[int, int]] = {}
        """By request that is not admitted yet: when its admission began, and how many evictions there were."""
        self._reused: dict[int, int] = {}
        """By such a request: the blocks of its hit."""
        self._early: dict[int, list[tuple[int, Content]]] = defaultdict(list)
        """By such a request: places and contents that it entered. vLLM does so before it reports the lookup."""
        self._lookups: dict[int, Lookup] = {}
        self._ended: list[tuple[int, Lookup]] = []

    def allocated(self, event: Run) -> None:
        """Note which contents an allocation evicts."""
        account = self._account
        self.begins(event.request)
        self._now += 1
        needless = account.free - account.cached_idle - len(event.ids) >= 0
        for block in event.ids:
            content = account.content.get(block)
            if content is not None:
                self._evictions += 1
                self._by[event.request].append(self._evictions)
                self._latest[content] = Evicted(self._evictions, event.request, needless)
                self._leaves(content, block)

    def reused(self, event: Run) -> None:
        """Note a prefix hit: in each KV group, of as many blocks as all of them have."""
        self.begins(event.request)
        if not event.group and event.request in self._began:
            self._reused[event.request] = len(event.ids)

    def begins(self, number: int) -> None:
        """Note that blocks are given to a request, which may be its admission."""
        if number not in self._account.running:
            self._began.setdefault(number, (self._now, self._evictions))

    def evicted(self, event: Run) -> None:
        """Note contents that the cache dropped by itself."""
        self._now += 1
        for block in event.ids:
            if block in self._account.content:
                self._leaves(self._account.content[block], block)

    def _leaves(self, content: Content, block: int) -> None:
        self._holders[content].discard(block)
        if not self._holders[content]:
            self._since[content].append((self._entered[content], self._now))

    def looked_up(self, event: Run) -> None:
        """Note a lookup of a request that is about to be admitted. Its hit is what it took over from the pool: what is
        fetched from outside is brought a second time.
        """
        if event.group:
            return
        self._now += 1
        if event.request in self._lookups:
            self._ended.append((event.request, self._lookups[event.request]))
        self.begins(event.request)
        hit = self._reused.pop(event.request, 0)
        lookup = Lookup(self._account, event.request, event.args[0], hit, *self._began.pop(event.request))
        self._lookups[event.request] = lookup
        for place, content in self._early.pop(event.request, ()):
            self._compare(lookup, place, content)

    def cached(self, event: Run) -> None:
        """Note what a request entered: content that it computed."""
        self._now += 1
        number = event.request
        places = {block: place for place, block in enumerate(self._account.requests[number].table[event.group])}
        for block, digest in zip(event.ids, event.args, strict=True):
            content, place = (event.group, digest), places.get(block, -1)
            if number in self._began:
                self._early[number].append((place, content))
            elif number in self._lookups:
                self._compare(self._lookups[number], place, content)
            if not self._holders[content]:
                self._entered[content] = self._now
            self._holders[content].add(block)

    def _compare(self, lookup: Lookup, place: int, content: Content) -> None:
        if not 0 <= place < lookup.last:
            return
        if self._was_there(content, lookup.at):
            lookup.missed[place].add(content[0])
        elif content in self._latest and self._latest[content].nth <= lookup.evictions:
            lookup.gone[place].append(self._latest[content])

    def _was_there(self, content: Content, at: int) -> bool:
        held = [*self._since[content]]
        if self._holders[content]:
            held.append((self._entered[content], self._now + 1))
        return any(entered <= at < left for entered, left in held)

    def losses(self) -> list[CacheLoss]:
        """Return what each lookup should have found, and why it did not."""
        found = []
        for number, lookup in [*self._ended, *self._lookups.items()]:
            size = self._account.block_size
            everywhere = {place for place, groups in lookup.missed.items() if len(groups) == self._account.groups}
            missed, gone = lookup.leading(everywhere), lookup.leading(set(lookup.gone))
            if missed:
                found.append(CacheLoss("prefix-missed", lookup.at_s, number, len(missed) * size))
            elif gone and not lookup.preempted:
                evictions = [one for place in gone for one in lookup.gone[place]]
                flushed = any(self._is_to_blame(one, lookup) for one in evictions)
                kind = "prefix-flushed" if flushed else "prefix-evicted"
                found.append(CacheLoss(kind, lookup.at_s, number, len(gone) * size))
        return found

    def _is_to_blame(self, one: Evicted, lookup: Lookup) -> bool:
        """Whether the content would be there had its evictor made no more than the victim takes."""
        made = bisect_right(self._by[one.by], lookup.evictions)
        return one.needless or lookup.evictions - one.nth < made - lookup.blocks
