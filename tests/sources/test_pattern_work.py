"""A search of a text is linear in it: what its expressions may try from one place is bounded, whatever stands there."""

from __future__ import annotations

import math
import re

import pytest

from kvscope.monitor.sources.log_patterns import PATTERNS
from kvscope.monitor.sources.pasted_lines import PastedLine
from kvscope.monitor.sources.report_phrases import MOST_PROSE, phrase_expressions, stated_phrases
from tests.sources.pattern_work import tries_from_one_place

MOST_TRIES = 2_000
"""Two gaps of 60 characters with a word between them need less, two gaps without one 3,721."""


def test_a_phrase_tries_a_bounded_number_of_ways_from_one_place() -> None:
    tries = {concept: tries_from_one_place(each) for concept, each in phrase_expressions().items()}
    assert {concept: most for concept, most in tries.items() if most > MOST_TRIES} == {}


def test_no_class_of_log_lines_reads_the_rest_of_a_line_from_each_place() -> None:
    expressions = {pattern.sample: re.compile(pattern.expression, re.ASCII) for pattern in PATTERNS}
    assert [sample for sample, each in expressions.items() if math.isinf(tries_from_one_place(each))] == []


@pytest.mark.parametrize(
    ("expression", "tries"),
    [
        (r"retract\w*[^.]{0,120}?slow", math.inf),
        (r"retract\w*+ slow", math.inf),
        (r"CPU[^.]{0,60}?(?:pool)?[^.]{0,60}?full", 61 * 61),
        (r"more [^.]{0,60}?than[^.]{0,60}?cache", 61 * 61 / 4),
        (r"retract\w{0,40}+[^.]{0,120}?slow", 121),
        (r"fail(?:s|ed)? to (?:start|load)", 1),
    ],
)
def test_what_is_tried_is_counted(expression: str, tries: float) -> None:
    assert tries_from_one_place(re.compile(expression)) == tries


def stated(*texts: str) -> dict[str, str]:
    lines = [PastedLine(number, text, text, text, False, number) for number, text in enumerate(texts, 1)]
    return {phrase.concept: phrase.quote for phrase in stated_phrases(lines)}


def test_words_of_usual_length_are_quoted_whole() -> None:
    assert stated("We use the NixlConnectorV1 here.")["connector"] == "NixlConnectorV1"
    assert stated("It has a WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR state.")["grammar"] == (
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"
    )
    assert stated("After many retractions it stays slow.")["after_retraction"] == "After many retractions it stays"


def test_prose_is_read_up_to_a_bound() -> None:
    filler = "a" * (MOST_PROSE // 4)
    assert "stuck" in stated(filler, filler, "It hangs.")
    assert "stuck" not in stated(filler, filler, filler, filler, filler, "It hangs.")
