"""Behaviour of vLLM that is changed at random: what a change does, and who counts as harmed by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.lab.lab_watch import FoundCode
from kvscope.lab.on_vllm.vllm_episode import VllmEpisode
from kvscope.lab.on_vllm.vllm_mutations import changed
from kvscope.lab.suffering import suffering_of
from kvscope.lab.truth.episode_end import EpisodeEnd, KeptBlocks, UnfinishedRequest
from kvscope.lab.vllm_python import needs_vllm


@pytest.mark.parametrize(
    ("kind", "seen", "given"),
    [
        ("skip", [[1, 2]], [1, 2]),
        ("repeat", [[1, 2], [3, 4, 5], [3, 4, 5]], [3, 4, 5]),
        ("delay", [[1, 2]], [1, 2]),
        ("stale", [[1, 2], [3, 4, 5]], [1, 2]),
        ("drop", [[1, 2], [4, 5]], [4, 5]),
        ("swap", [[1, 2], [4, 3, 5]], [4, 3, 5]),
    ],
)
def test_a_change_does_what_it_is_called(kind: str, seen: list[list[int]], given: list[int]) -> None:
    received: list[list[int]] = []
    wrong = iter((False, True))

    def method(blocks: list[int]) -> list[int]:
        received.append(blocks)
        return blocks

    differs: list[bool] = []
    different = changed(method, kind, lambda: next(wrong), lambda: differs.append(True))
    assert different([1, 2]) == [1, 2]
    assert different([3, 4, 5]) == given
    assert received == seen
    assert differs


@pytest.mark.parametrize("kind", ["stale", "drop", "swap"])
def test_what_changes_nothing_is_known_to_make_no_difference(kind: str) -> None:
    differs: list[bool] = []
    different = changed(lambda: True, kind, lambda: True, lambda: differs.append(True))
    assert different()
    assert different()
    assert not differs


def test_a_delayed_call_is_made_with_the_next() -> None:
    received: list[int] = []
    late = changed(received.append, "delay", lambda: True, lambda: None)
    for number in (1, 2, 3):
        late(number)
    assert received == [1, 2]


def end(**changes: object) -> EpisodeEnd:
    usual = {"watched_s": 100.0, "drained_s": 0.0, "busy_s": 100.0, "steps": 1_000, "short_steps": 0, "request_s": 0.0}
    counts = {"usable_blocks": 100, "asked": 3, "tokens_computed": 9}
    return EpisodeEnd(**(usual | counts | {"mutation": "skip pool.touch"} | changes))  # type: ignore[arg-type]


def test_who_stands_still_and_never_ends_suffers_and_is_named_or_not() -> None:
    stands = [UnfinishedRequest("early", "waiting", 10.0), UnfinishedRequest("late", "waiting", 90.0)]
    kept = [KeptBlocks("nothing", list(range(30)), 5.0)]
    found = [FoundCode("harm.unserved", 50.0, "confirmed", "", ["other"])]
    silent, told = suffering_of(end(unfinished=stands), []), suffering_of(end(unfinished=stands, kept=kept), found)
    assert (silent.requests, silent.unnamed, silent.silent) == (["early"], ["early"], True)
    assert (told.requests, told.unnamed, told.silent, told.held) == (["early"], ["early"], False, 0.3)
    assert suffering_of(end(kept=kept), []).silent
    assert not suffering_of(end(unfinished=stands, failed_s=20.0), []).requests, "an engine that ended itself"
    assert not suffering_of(end(unfinished=stands, steps=5), []).requests, "each of its steps takes 20 s"


@needs_vllm
@pytest.mark.slow
@pytest.mark.usefixtures("worker")
def test_vllm_itself_is_changed_at_a_drawn_moment(tmp_path: Path) -> None:
    changes = []
    for number in range(3):
        episode = VllmEpisode(number, 7, tmp_path / str(number), "random-mutation")
        episode.watch()
        changes.append(episode.drain().mutation)
    assert all(changes)
    assert len(set(changes)) > 1
