"""Every held block answers "because": one chain for each reference, down to a live reason."""

from __future__ import annotations

import pytest

from kvscope.monitor.base.text import clock_time, duration
from kvscope.monitor.contract.kinds import Holder, Release, Status
from kvscope.monitor.ledger.wait_graph import because
from tests.detectors.scenes import Spoken, Watched, finished_held, never_fits, unaccounted


def chains(scene: Watched | Spoken, block: int) -> list[str]:
    return [" ← ".join(chain) for chain in because(scene.ledger, block)]


def test_one_chain_for_each_reference_of_every_block() -> None:
    """Over a lab with shared prefixes, deferrals, an abort that skipped its free, and preemptions."""
    scene = Watched(total=49, connector_share=0.5, faults=["leak.unaccounted:every=2"])
    prefix = list(range(16))
    checked = 0
    for n in range(120):
        if n % 3 == 0:
            scene.lab.arrive([*prefix, 100 + n], max_tokens=25)
        if n % 17 == 5 and scene.lab.scheduler.running:
            scene.lab.abort(scene.lab.scheduler.running[0])
        scene.steps(1)
        for block in range(1, scene.lab.pool.total):
            held_by = because(scene.ledger, block)
            assert len(held_by) == max(1, scene.lab.pool.refs[block])
            assert all(chain[0] == f"block {block}" and len(chain) > 1 for chain in held_by)
            checked += scene.lab.pool.refs[block]
    assert checked > 1000
    assert scene.ledger.state.totals.preemptions


def test_the_null_block_a_free_one_and_a_cached_one() -> None:
    scene = Watched()
    scene.lab.arrive(6, max_tokens=1)
    scene.run_until_idle()
    scene.live(2)
    assert chains(scene, 0) == ["block 0 ← reserved: the null block, never handed out"]
    cached = [b for b in range(1, scene.lab.pool.total) if scene.lab.pool.digests[b] is not None]
    assert len(cached) == 1
    (text,) = chains(scene, cached[0])
    assert text == f"block {cached[0]} ← cached-idle for 2.0 s: the prefix cache keeps it until the space is needed"
    (text,) = chains(scene, scene.lab.pool.total - 1)
    assert text.startswith(f"block {scene.lab.pool.total - 1} ← free for ")


def test_a_shared_block_has_a_chain_for_each_that_shares_it() -> None:
    scene = unaccounted(fault="")
    request, other = scene.lab.scheduler.running
    shared = scene.lab.blocks_of(request.number)[0]
    since = {record.number: record.since_ns for record in scene.ledger.state.requests.values()}
    assert chains(scene, shared) == [
        f"block {shared} ← request {r.id}, RUNNING for {duration(age)} ← {r.num_computed_tokens} tokens computed,"
        f" {len(r.output_token_ids)} generated"
        for r, age in ((r, scene.ledger.age_s(since[r.number])) for r in (request, other))
    ]


def test_a_running_request_that_does_not_move() -> None:
    scene = Watched()
    request = scene.lab.arrive(6, max_tokens=50)
    scene.steps(3)
    scene.launch()
    scene.beat(31)
    (text,) = chains(scene, scene.lab.blocks_of(request.number)[0])
    assert text.endswith("last progress 31 s ago")


def test_a_deferred_free_and_how_long_it_waits() -> None:
    scene = finished_held()
    scene.live(60)
    number = next(iter(scene.lab.manager.tables))
    table = scene.lab.blocks_of(number)
    record = scene.ledger.state.requests[number]
    (text,) = chains(scene, table[0])
    ended = clock_time(scene.ledger.wall(record.finished_ns))
    waited = scene.ledger.age_s(scene.ledger.state.deferrals[number].since_ns)
    assert text == (
        f"block {table[0]} ← request {record.id}, FINISHED_LENGTH_CAPPED {ended} ← free deferred by the KV connector"
        f" ← waits for a completion, {waited:.0f} s"
    )


def test_what_an_abort_left_is_unaccounted() -> None:
    scene = unaccounted()
    lost = scene.ledger.state.unaccounted()[0]
    record = scene.ledger.request("r-1")
    assert record is not None
    ended = clock_time(scene.ledger.wall(record.finished_ns))
    assert chains(scene, lost) == [
        f"block {lost} ← request r-1, FINISHED_ABORTED {ended} ← UNACCOUNTED: neither released nor deferred"
    ]
    shared = next(b for b in scene.ledger.state.unexplained_references() if scene.lab.pool.refs[b] == 3)
    texts = chains(scene, shared)
    assert [("UNACCOUNTED" in text, "RUNNING" in text) for text in texts] == [
        (True, False),
        (False, True),
        (False, True),
    ]


@pytest.mark.parametrize(
    ("holder", "why"),
    [
        (Holder.CONNECTOR, "free deferred by the KV connector ← waits for a completion"),
        (Holder.FENCE, "free deferred by a step that may still write it ← waits for the step"),
        (Holder.SESSION, "free deferred by an open session ← waits for the session's next input"),
        (17, "free deferred by somebody ← waits"),
    ],
)
def test_each_holder_of_a_deferred_free_and_its_lease(holder: Holder, why: str) -> None:
    scene = Spoken()
    scene.arrive(7, [3, 4])
    scene.log.detached(7, [3])
    scene.log.finished(7, Status.FINISHED_STOPPED)
    scene.log.free_deferred(7, [3, 4], holder, lease_deadline_ns=scene.clock.monotonic_ns() + 90_000_000_000)
    scene.say()
    scene.wait(30)
    in_table, detached = chains(scene, 4)[0], chains(scene, 3)[0]
    assert in_table.endswith(f"{why}, 30 s (lease ends in 60 s)")
    assert detached == f"block 3 ← once in the table of request r-7, detached ← {why}, 30 s (lease ends in 60 s)"
    scene.wait(100)
    assert chains(scene, 3)[0].endswith("2 min (lease ended 40 s ago)")
    scene.log.reclaimed([3], Release.TRANSFER_DONE)
    scene.log.released(7, [4], Release.TRANSFER_DONE)
    scene.wait(1)
    assert chains(scene, 3) == ["block 3 ← free for 1.0 s"]


def test_a_lease_has_ended_at_its_deadline() -> None:
    scene = Spoken()
    scene.arrive(7, [3])
    scene.log.finished(7, Status.FINISHED_STOPPED)
    scene.log.free_deferred(7, [3], Holder.CONNECTOR, lease_deadline_ns=scene.clock.monotonic_ns() + 90_000_000_000)
    scene.wait(90)
    assert chains(scene, 3)[0].endswith(f"(lease ended {duration(0)} ago)")


def test_a_waiting_request_that_holds_blocks() -> None:
    """Parked while its KV is fetched."""
    scene = Spoken()
    scene.arrive(7, [3, 4])
    scene.log.waiting_on(7, Status.WAITING_FOR_REMOTE_KVS)
    scene.say()
    scene.wait(5)
    assert chains(scene, 3) == ["block 3 ← request r-7, WAITING_FOR_REMOTE_KVS for 5.0 s ← waits: REMOTE_KV"]


def test_a_reference_that_no_event_ever_spoke_of() -> None:
    scene = Spoken(total=5)
    scene.arrive(7, [3])
    scene.log.audit_begin(1)
    scene.log.audit_blocks(1, [2, 2, 3 * 4, 1 * 4])
    scene.say()
    assert chains(scene, 3)[1:] == ["block 3 ← UNACCOUNTED: 2 references that no request acquired in any event"]
    assert chains(scene, 4) == ["block 4 ← UNACCOUNTED: 1 reference that no request acquired in any event"]


def test_a_block_that_the_pool_has_not() -> None:
    scene, _ = never_fits()
    for block in (-1, scene.lab.pool.total):
        with pytest.raises(ValueError, match=f"no block {block}: .* 0 to {scene.lab.pool.total - 1}"):
            because(scene.ledger, block)
