"""What to do about a finding is read from its runbook, with what is known of the engine at hand."""

from __future__ import annotations

import pytest

from kvscope.monitor.detectors.runbook_files import runbook_advice

RUNBOOK = r"""# acme.full: the pool is full

## Do now

- Lower `--max-num-seqs` to the number that fits, or see
  [stuck.never-fits](stuck.never-fits.md).

For readers of the page alone.

### From metrics

- Read the log's \`KV cache size\`.

## Change

- Enlarge the pool.

### From metrics, at idle

Nothing yet.
"""


def test_bullets_are_plain_text_and_the_rest_is_for_readers() -> None:
    advice = runbook_advice(RUNBOOK)
    assert advice["do_now"] == ("Lower --max-num-seqs to the number that fits, or see stuck.never-fits.",)
    assert (advice["change"], advice["wont_help"]) == (("Enlarge the pool.",), ())


def test_a_case_that_a_section_leaves_out_has_its_own_bullets() -> None:
    assert runbook_advice(RUNBOOK, "From metrics")["do_now"] == ("Read the log's `KV cache size`.",)
    assert runbook_advice(RUNBOOK, "From metrics")["change"] == ("Enlarge the pool.",)
    at_idle = runbook_advice(RUNBOOK, "From metrics, at idle")
    assert (at_idle["do_now"], at_idle["change"]) == (("Read the log's `KV cache size`.",), ())


def test_a_value_replaces_its_phrase_once_whatever_it_says() -> None:
    numbers = {"the number that fits": "12, or see it", "or see": "and"}
    assert runbook_advice(RUNBOOK, "", numbers)["do_now"][0].startswith("Lower --max-num-seqs to 12, or see it, and")


@pytest.mark.parametrize(("case", "phrase"), [("From a log", "fits"), ("", "what no bullet has")])
def test_a_case_or_phrase_that_the_runbook_lacks_is_an_error(case: str, phrase: str) -> None:
    with pytest.raises(KeyError):
        runbook_advice(RUNBOOK, case, {phrase: 1})
