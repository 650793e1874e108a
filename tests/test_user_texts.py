"""The texts of the program that are counted: each kind finds its own, and nothing that users do not read."""

from __future__ import annotations

from scripts.prose_counts import counts_of
from scripts.user_texts import (
    comments_of,
    finding_texts,
    help_texts,
    json_keys,
    label_texts,
    messages_of,
    metric_texts,
    strings_of,
    words_of,
)

SOURCE = '''
"""A docstring that has more than six words in it."""
SHORT = "a label"
QUERY = "SELECT what FROM nobody WHERE it was told by somebody"
PATTERN = r"(?:was told by|says) something in a very long line"
name = f"the pool of {engine} has {count} blocks that it can use"  # noqa: F821
raise ValueError("this is not a number that the option takes")
# A comment that goes on
# in the next line.
'''


def test_messages_are_the_strings_that_people_read() -> None:
    assert list(messages_of(SOURCE)) == [
        "the pool of code has code blocks that it can use",
        "this is not a number that the option takes",
    ]
    assert "a label" in list(strings_of(SOURCE))


def test_comments_that_follow_each_other_are_one_text() -> None:
    assert [each.strip() for each in comments_of(SOURCE)] == ["", "A comment that goes on in the next line."]


def test_names_are_read_as_words_and_names_of_metrics_are_not() -> None:
    assert words_of("usage_told_before") == "usage told before"
    assert counts_of([words_of("usage_told_before")]).odd_words == 1
    assert words_of("time() - kvscope_engine_last_heard_timestamp_seconds > 5") == "time()   code > 5"


def test_each_kind_finds_texts_that_users_see() -> None:
    keys, helps = set(json_keys()), set(help_texts())
    assert {"ownership chains", "schema version", "connector polls", "over requested bytes"} <= keys
    assert "because" not in keys, "a deprecated key is not counted"
    assert "diagnose engines and recommend what to do" in helps
    assert any("0 picks a free port" in each for each in helps)
    assert any("did not fall when Running" in each for each in finding_texts())
    assert any("Time of the engine's last event" in each for each in metric_texts())
    assert {"Timeline", "caused by"} <= set(label_texts())
