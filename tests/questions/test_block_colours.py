"""Every block by its owner, age, references and prefix, held against the ledger's own books."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.questions.blocks import AGES_S, MAX_COLOURED_OWNERS, OTHER_OWNERS, REFERENCES
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.schema import Colouring

ENGINE = "lab@127.0.0.1:0/0"


@pytest.fixture(scope="module")
def watch() -> Pipeline:
    """A pool in the middle of a load with shared prefixes, more owners than colours, and a leak."""
    lab = Lab(total=300, max_num_seqs=40, max_num_batched_tokens=120, faults=["leak.unaccounted"])
    shared = [list(range(first, first + 12)) for first in (1, 100)]
    for number in range(30):
        lab.arrive([*shared[number % 2], *range(1000 + 20 * number, 1006 + 20 * number)], max_tokens=40)
    for number in range(12):
        lab.step(seconds=0.3)
        if number == 8 and lab.scheduler.running:
            lab.abort(lab.scheduler.running[0])
    lab.flush()
    watch = Pipeline()
    watch.feed(lab.frames)
    return watch


def ledger_of(watch: Pipeline) -> EngineLedger:
    return watch.fleet.engines[ENGINE]


@pytest.mark.parametrize("by", get_args(Colouring))
def test_each_block_has_a_value_that_a_key_explains(watch: Pipeline, by: Colouring) -> None:
    reported = watch.block_colours(ENGINE, by)
    state = ledger_of(watch).state
    counts = Counter(reported.values[state.reserved :])
    assert len(reported.values) == reported.total == state.total
    assert sum(key.share or 0 for key in reported.keys) == pytest.approx(1)
    assert {key.value: key.blocks for key in reported.keys} == counts
    assert len(counts) > 1
    assert max(counts) <= OTHER_OWNERS


def test_owners_are_those_of_the_request_tables(watch: Pipeline) -> None:
    reported = watch.block_colours(ENGINE, "owner")
    named = {key.value: key.request for key in reported.keys if key.request}
    assert len(named) == MAX_COLOURED_OWNERS
    state = ledger_of(watch).state
    by_name = {record.id: record for record in state.requests.values()}
    for block, value in enumerate(reported.values):
        owners = state.owners(block)
        assert bool(value) == bool(owners or state.detached.get(block))
        if value in named:
            assert by_name[named[value]].number in owners


def test_references_and_ages_rise_with_their_values(watch: Pipeline) -> None:
    ledger = ledger_of(watch)
    state = ledger.state
    by_references = watch.block_colours(ENGINE, "references").values
    for refs, value in zip(state.refs, by_references, strict=True):
        assert value == sum(refs >= bound for bound in REFERENCES)
    by_age = watch.block_colours(ENGINE, "age").values
    for block, value in enumerate(by_age):
        if state.refs[block] <= 0 and not state.hashes[block]:
            assert value == 0
        else:
            assert value == 1 + sum(ledger.age_s(state.since[block]) >= bound for bound in AGES_S)


def test_blocks_of_a_shared_prefix_are_of_one_colour(watch: Pipeline) -> None:
    state = ledger_of(watch).state
    reported = watch.block_colours(ENGINE, "prefix")
    assert all(bool(value) == bool(hashed) for value, hashed in zip(reported.values, state.hashes, strict=True))
    shared = [block for block, refs in enumerate(state.refs) if refs > 3 and state.hashes[block]]
    assert shared
    for block in shared:
        tables = [state.requests[number].blocks for number in state.owners(block)]
        alike = set.intersection(*map(set, tables))
        assert len({reported.values[b] for b in alike if state.hashes[b]}) == 1


@pytest.mark.parametrize("template", [8, 0])
def test_chats_that_share_a_template_have_colours_of_their_own(template: int) -> None:
    lab = Lab(total=300, max_num_seqs=40)
    for number in range(10):
        own = [1_000 * (number + 1) + n for n in range(4 * (number + 1))]
        lab.arrive([*range(template), *own], max_tokens=1)
        lab.run_until_idle()
    lab.flush()
    watch = Pipeline()
    watch.feed(lab.frames)
    reported = watch.block_colours(ENGINE, "prefix")
    counts = sorted(Counter(value for value in reported.values if value).values(), reverse=True)
    assert counts[:9] == list(range(10, 1, -1))
    assert len(counts) == 10 + bool(template)  # and what all of them share


def test_a_colouring_of_a_moment_is_of_that_moment(watch: Pipeline) -> None:
    early, late = watch.points(ENGINE)[2], watch.points(ENGINE)[-1]
    assert early.at < late.at
    for by in get_args(Colouring):
        reported = watch.block_colours(ENGINE, by, early.at)
        assert reported.at == early.at
    assert watch.block_colours(ENGINE, "owner", early.at) != watch.block_colours(ENGINE, "owner", late.at)
