"""What KV events add up to: held against a count by hand, and after what makes the past unknown."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvscope.lab.kv_publisher import encoded, recorded
from kvscope.monitor.contract.samples import KvEvent, KvEvents
from kvscope.monitor.ledger import cached_prefixes
from kvscope.monitor.ledger.cached_prefixes import SETTLED_NS, CachedPrefixes
from kvscope.monitor.sources.kv_event_stream import decode_kv_events

ENGINE = "vllm@here/0"
RECORDINGS = ["kv-events", "healthy-shared-prefix", "never-freed"]


def records(name: str) -> list[KvEvents]:
    """A recording as the source brings it."""
    out = []
    for batch in recorded(name):
        at_ns, events, _ = decode_kv_events(encoded(batch, "maps"))
        out.append(KvEvents(ENGINE, str(batch.sequence), at_ns, events))
    return out


def step(at_s: float, *events: KvEvent, **more: Any) -> KvEvents:
    return KvEvents(ENGINE, f"{at_s:g}", int(at_s * 1e9), list(events), **more)


def stored(*hashes: int | bytes, parent: int | None = None, group: int = 0) -> KvEvent:
    return KvEvent("stored", list(hashes), parent, group)


def removed(*hashes: int | bytes, group: int = 0) -> KvEvent:
    return KvEvent("removed", list(hashes), None, group)


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_books_of_real_recordings(name: str) -> None:
    """At every batch what is kept is what was stored and not removed, and it never exceeds the pool."""
    ledger_state = CachedPrefixes()
    kept: Counter[tuple[int, int | bytes]] = Counter()
    for record in records(name):
        for event in record.events:
            if event.what == "cleared":
                kept.clear()
            for value in event.hashes:
                kept[event.group, value] += 1 if event.what == "stored" else -1
        ledger_state.apply(record)
        kept = +kept
        assert {content: blocks for content, (blocks, _) in ledger_state.kept.items()} == kept
        assert ledger_state.kept_blocks == kept.total()
    whole = [event for record in records(name) for event in record.events]
    assert ledger_state.stored == sum(len(event.hashes) for event in whole if event.what == "stored")
    assert ledger_state.removed == sum(len(event.hashes) for event in whole if event.what == "removed")
    assert ledger_state.cleared == sum(event.what == "cleared" for event in whole)
    assert ledger_state.lost == ledger_state.forgotten == 0


def test_the_same_content_in_two_blocks_is_there_until_both_are_gone() -> None:
    ledger_state = CachedPrefixes()
    ledger_state.apply(step(0, stored(1, 2), stored(1, 2)))
    ledger_state.apply(step(1, removed(1)))
    assert (ledger_state.kept_blocks, len(ledger_state.kept)) == (3, 2)
    ledger_state.apply(step(2, removed(1, 1), removed(9)))
    assert (ledger_state.kept_blocks, len(ledger_state.kept), ledger_state.removed) == (2, 1, 2)


def test_the_same_hash_in_another_group_is_another_content() -> None:
    ledger_state = CachedPrefixes()
    ledger_state.apply(step(0, stored(1, 2)))
    ledger_state.apply(step(60, stored(1, 2, group=1)))
    assert ledger_state.again == 0
    ledger_state.apply(step(61, removed(1, group=1)))
    assert set(ledger_state.kept) == {(0, 1), (0, 2), (1, 2)}


def test_what_is_stored_though_it_was_there() -> None:
    settled = SETTLED_NS / 1e9
    ledger_state = CachedPrefixes()
    ledger_state.apply(step(0, stored(1, 2, 3)))
    ledger_state.apply(step(settled - 1, stored(1, 2, 3)))  # beside the first: they came together
    assert ledger_state.again == 0
    ledger_state.apply(step(settled, stored(3, 4)))  # the last block of a prompt is always computed
    assert ledger_state.again == 0
    ledger_state.apply(step(settled, stored(1, 2, 3)))
    assert ledger_state.again == 3
    ledger_state.apply(step(2 * settled, removed(1, 1, 1), stored(1)))
    ledger_state.apply(step(2 * settled + 1, stored(1, 5)))
    assert ledger_state.again == 3


@pytest.mark.parametrize("how", [{"lost": 2}, {"restarted": True}])
def test_after_a_gap_or_in_a_new_life_nothing_is_known_of_what_is_kept(how: dict[str, Any]) -> None:
    ledger_state = CachedPrefixes()
    ledger_state.apply(step(0, stored(1, 2, 3)))
    ledger_state.apply(step(60, stored(1, 2, 3), **how))
    assert (ledger_state.again, ledger_state.kept_blocks, ledger_state.lost) == (0, 3, how.get("lost", 0))


def test_a_chain_and_what_it_evicts() -> None:
    ledger_state = CachedPrefixes()
    ledger_state.apply(step(0, stored(1, 2, 3, 4)))
    ledger_state.apply(step(1, removed(1, 2), stored(11, 12)))
    ledger_state.apply(step(2, removed(3), stored(13, parent=12)))
    ledger_state.apply(step(3, stored(1, 2), stored(21, 22)))
    (culprit,) = ledger_state.culprits
    assert (culprit.position, culprit.stored, culprit.evicted, culprit.missed, culprit.kept_before) == ("1", 3, 3, 2, 4)


def test_of_two_chains_in_a_step_nobody_can_tell_whose_an_eviction_was() -> None:
    ledger_state = CachedPrefixes()
    ledger_state.apply(step(0, stored(1, 2, 3, 4)))
    ledger_state.apply(step(1, removed(1, 2), stored(11), stored(21)))
    ledger_state.apply(step(2, stored(1, 2)))
    assert not ledger_state.culprits


def test_the_books_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_prefixes, "MAX_HASHES", 100)
    ledger_state = CachedPrefixes()
    for n in range(1000):
        ledger_state.apply(step(n, removed(n - 1), stored(n, -n)))
    assert len(ledger_state.kept) <= 100
    assert ledger_state.kept_blocks == sum(blocks for blocks, _ in ledger_state.kept.values())
    assert ledger_state.forgotten


def test_nothing_is_forgotten_until_there_are_more_contents_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_prefixes, "MAX_HASHES", 4)
    ledger_state = CachedPrefixes()
    ledger_state.apply(step(0, stored(1, 2, 3, 4)))
    assert (len(ledger_state.kept), ledger_state.forgotten) == (4, 0)
    ledger_state.apply(step(1, stored(5)))
    assert ([value for _, value in ledger_state.kept], ledger_state.forgotten) == ([2, 3, 4, 5], 1)
