"""The prefix cache of an engine, as far as its KV events show: a fold of them.

A hash names the content of a block. One that is stored while it is kept already was computed again though the cache had
it: not by chance if it was kept for a while (alike prompts that come together are computed side by side) and if it is
not the only one (the last block of a prompt always is). One that is stored after it was removed was missed. A chain is
one prompt and what was generated for it: its stored blocks name each other as parents. Evictions are a chain's if no
other chain stored anything much in the same step.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Final, NamedTuple

from ..contract.samples import KvEvent, KvEvents

MAX_HASHES: Final = 1 << 20
MAX_CHAINS: Final = 4_096
MAX_STEPS: Final = 20_000
SETTLED_NS: Final = 5_000_000_000
"""After this time a content is there for every prompt that arrives: alike prompts are computed side by side."""
MOST_OF_STEP: Final = 0.9
"""The share of the blocks stored in a step that makes the evictions of that step a chain's."""

ContentHash = int | bytes
Content = tuple[int, ContentHash]
"""A KV group, and what a block of it holds."""


class Chain:
    """A prompt with its output: how many blocks it stored, what it evicted, and how much of that was needed again."""

    def __init__(self, began_ns: int, position: str, kept_before: int) -> None:
        self.began_ns = began_ns
        self.position = position
        self.kept_before = kept_before
        self.stored = 0
        self.evicted = 0
        self.missed = 0
        """Evicted contents that were stored again since, and had to be computed again for it."""


class Step(NamedTuple):
    """How many contents one batch stored, and how many of them the cache had kept for a while already."""

    at_ns: int
    position: str
    stored: int
    again: int


class CachedPrefixes:
    """The prefix cache of one engine, by content. All counts are since reading began."""

    def __init__(self) -> None:
        self.kept: dict[Content, tuple[int, int]] = {}
        """How many blocks hold each content (requests that compute the same at once have one each), and since when."""
        self.kept_blocks = 0
        self.stored = 0
        self.again = 0
        self.removed = 0
        self.cleared = 0
        self.lost = 0
        self.forgotten = 0
        """Contents that were dropped here because there were too many to track."""
        self.steps: deque[Step] = deque(maxlen=MAX_STEPS)
        """The last batches that stored anything."""
        self.culprits: deque[Chain] = deque(maxlen=MAX_CHAINS)
        """Chains that evicted what was needed again, in the order in which that was found."""
        self._ends: dict[Content, Chain] = {}
        self._evicted: dict[Content, Chain] = {}

    def apply(self, record: KvEvents) -> None:
        """Fold in one batch. After a gap, or in a new epoch, nothing is known of the cache."""
        self.lost += record.lost
        if record.lost or record.restarted:
            self._forget()
        kept_before = self.kept_blocks
        stored = again = 0
        by_chain: Counter[Chain] = Counter()
        removed: list[Content] = []
        for event in record.events:
            if event.what == "stored":
                chain = self._chain(event, record, kept_before)
                by_chain[chain] += len(event.hashes)
                stored += len(event.hashes)
                again += self._store(event, record.at_ns)
            elif event.what == "removed":
                removed += self._remove(event)
            else:
                self.cleared += 1
                self._forget()
        self.stored += stored
        self.again += again
        self.removed += len(removed)
        if stored:
            self.steps.append(Step(record.at_ns, record.position, stored, again))
            self._blame(by_chain, removed)

    def _store(self, event: KvEvent, at_ns: int) -> int:
        """Store its contents. Return how many of them the cache had, so that they need not have been computed."""
        again = 0
        for value in event.hashes:
            content = (event.group, value)
            blocks, since_ns = self.kept.get(content, (0, at_ns))
            again += at_ns - since_ns >= SETTLED_NS
            self.kept[content] = (blocks + 1, since_ns)
            self.kept_blocks += 1
            culprit = self._evicted.pop(content, None)
            if culprit is not None:
                if not culprit.missed:
                    self.culprits.append(culprit)
                culprit.missed += 1
        while len(self.kept) > MAX_HASHES:
            self.kept_blocks -= self.kept.pop(next(iter(self.kept)))[0]
            self.forgotten += 1
        return again if again > 1 else 0

    def _remove(self, event: KvEvent) -> list[Content]:
        """Remove its contents. Return those that were known to be kept."""
        found = []
        for value in event.hashes:
            content = (event.group, value)
            blocks, since_ns = self.kept.get(content, (0, 0))
            if not blocks:
                continue
            found.append(content)
            self.kept_blocks -= 1
            if blocks > 1:
                self.kept[content] = (blocks - 1, since_ns)
            else:
                del self.kept[content]
        return found

    def _chain(self, event: KvEvent, record: KvEvents, kept_before: int) -> Chain:
        """Return the prompt that these blocks continue. Blocks without a known beginning begin here."""
        chain = None if event.parent is None else self._ends.pop((event.group, event.parent), None)
        if chain is None:
            chain = Chain(record.at_ns, record.position, kept_before)
        chain.stored += len(event.hashes)
        if event.hashes:
            self._ends[event.group, event.hashes[-1]] = chain
        while len(self._ends) > MAX_CHAINS:
            del self._ends[next(iter(self._ends))]
        return chain

    def _blame(self, by_chain: Counter[Chain], removed: list[Content]) -> None:
        ((chain, most),) = by_chain.most_common(1)
        if most < MOST_OF_STEP * sum(by_chain.values()):
            return
        for content in removed:
            if content not in self.kept:
                chain.evicted += 1
                self._evicted[content] = chain
        while len(self._evicted) > MAX_HASHES:
            del self._evicted[next(iter(self._evicted))]

    def _forget(self) -> None:
        self.kept.clear()
        self.kept_blocks = 0
        self._ends.clear()
        self._evicted.clear()
