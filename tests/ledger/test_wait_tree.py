"""What a request waits for, down to whoever could end it."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.wait_graph import MAX_WAIT_HOLDERS, Wait, WaitHolder, progress_text, wait_of
from tests.detectors import stuck
from tests.detectors.scenes import Watched, never_fits, unaccounted
from tests.test_effects import starved


def tree_of(ledger: EngineLedger, name: str) -> Wait:
    record = ledger.request(name)
    assert record is not None
    return wait_of(ledger, record)


def roots(wait: Wait) -> Iterator[Wait]:
    if not wait.waits_for:
        yield wait
    for below in wait.waits_for:
        yield from roots(below)


def test_behind_the_head_that_lacks_what_a_connector_keeps() -> None:
    ledger = starved(leaks=True).ledger
    small = tree_of(ledger, "small")
    (head,) = small.waits_for
    record, runs = ledger.request("head"), ledger.request("runs")
    assert record is not None
    assert runs is not None
    assert f"is short of {record.blocks_needed - record.blocks_free_then} blocks" in head.text
    connector, running = head.waits_for
    assert (connector.blocks, running.blocks) == (ledger.balance().finished, len(runs.blocks))
    assert "connector" in connector.text
    assert "4 requests that ended" in connector.text
    assert "runs" in running.text
    assert list(roots(small)) == [connector, running]


def test_two_that_wait_for_one_another() -> None:
    scene = stuck.parked_loads()
    scene.live(5)
    ledger = scene.ledger
    head = ledger.head()
    assert head is not None
    (holder,) = tree_of(ledger, head.id).waits_for
    (again,) = holder.waits_for
    assert head.id in again.text
    assert "a deadlock" in again.text


def test_nothing_that_anybody_gives_back_helps_who_needs_more_than_the_pool() -> None:
    scene, big = never_fits()
    (root,) = roots(tree_of(scene.ledger, "small-2"))
    assert big.id in root.text
    assert f"the whole pool has {scene.lab.pool.usable}" in root.text


def test_what_comes_from_outside_is_a_root() -> None:
    scene = stuck.remote_load()
    (fetched,) = [r for r in scene.ledger.state.requests.values() if r.fetching_ns]
    (root,) = wait_of(scene.ledger, fetched).waits_for
    assert "connector" in root.text
    assert "its KV is being fetched" in wait_of(scene.ledger, fetched).text
    scene, request = stuck.grammar()
    (root,) = tree_of(scene.ledger, request.id).waits_for
    assert "grammar" in root.text


def test_a_place_and_blocks_that_nobody_owns() -> None:
    scene = Watched(max_num_seqs=7)
    for _ in range(9):
        scene.lab.arrive(4, max_tokens=60)
    scene.steps(4)
    ledger = scene.ledger
    head = ledger.head()
    assert head is not None
    wait = wait_of(ledger, head)
    assert "7 run, of 7" in wait.text
    assert len(wait.waits_for) == MAX_WAIT_HOLDERS + 1
    assert sum(one.blocks for one in wait.waits_for) == ledger.balance().running
    assert wait.waits_for[-1].text == "2 more"

    leaky = unaccounted()
    leaky.lab.arrive(200, max_tokens=4, name="late")
    leaky.steps(20)
    unexplained = [one for one in roots(tree_of(leaky.ledger, "late")) if "UNACCOUNTED" in one.text]
    assert [one.blocks for one in unexplained] == [leaky.ledger.balance().unaccounted]


def test_a_holder_that_moves_lacks_no_progress() -> None:
    still = WaitHolder("request", "r-1", unit="tokens", still_s=3.0, moves=False)
    assert progress_text(still) == "no token for 3.0 s"
    assert progress_text(still._replace(moves=True)) == progress_text(still._replace(unit="")) == ""


def test_a_late_step_and_one_that_is_over_lack_progress_of_another_kind() -> None:
    step = WaitHolder("step", "step 4", unit="steps", still_s=3.0)
    assert progress_text(step) == "longer than any earlier step"
    assert progress_text(step._replace(kind="fence")) == "its step is over since 3.0 s"
