"""A connector that is done with a request keeps none of its blocks, whether or not the engine frees them all."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.kinds import Cause, Holder, Release, Status
from kvscope.monitor.ledger.engine_state import EngineState
from kvscope.monitor.probes.packer import Packer, Vitals


class Kept:
    """A request that ended, and whose blocks the connector keeps."""

    def __init__(self, *, fetching: bool = False) -> None:
        self.log = EventLog()
        self.packer = Packer(self.log, "e@h:1/0", lambda: Vitals(-1, 0, 0, 0, 0, 0, 0))
        self.log.started(20, 1, 16, "")
        self.log.arrived(1, "r-1", 16, 16, 0, 1, 2)
        self.log.queued(1, Cause.NEW)
        self.log.allocated(1, [3, 4])
        if fetching:
            self.log.waiting_on(1, Status.WAITING_FOR_REMOTE_KVS)
        else:
            self.log.admitted(1, 0)
        self.log.finished(1, Status.FINISHED_ABORTED)
        self.log.free_deferred(1, [3, 4], Holder.CONNECTOR)

    def state(self) -> EngineState:
        self.log.flush(0, 0, (-1, -1, -1, -1))
        self.packer.pack()
        return self.packer.shadow


@pytest.mark.parametrize("reason", [Release.TRANSFER_DONE, Release.LEASE_EXPIRED])
def test_a_block_that_the_free_after_a_transfer_leaves_is_unaccounted(reason: Release) -> None:
    engine = Kept()
    engine.log.released(1, [3], reason)
    assert engine.state().unaccounted() == [4]


def test_all_blocks_are_unaccounted_if_the_free_after_a_transfer_is_skipped() -> None:
    engine = Kept()
    engine.log.completion_delivered(1)
    assert engine.state().unaccounted() == [3, 4]


def test_a_release_for_another_reason_leaves_the_rest_to_the_connector() -> None:
    engine = Kept()
    engine.log.released(1, [3], Release.ROLLED_BACK)
    assert (engine.state().unaccounted(), engine.state().sending_blocks(1)) == ([], [4])


def test_blocks_of_a_fetch_stay_with_the_connector_until_the_engine_takes_its_end_in() -> None:
    engine = Kept(fetching=True)
    engine.log.fetch_ended(1)
    assert (engine.state().unaccounted(), engine.state().sending_blocks(1)) == ([], [3, 4])


def test_a_fence_outlives_the_connector() -> None:
    engine = Kept()
    engine.log.completion_delivered(1)
    engine.log.free_deferred(1, [3, 4], Holder.FENCE, fence=5)
    engine.log.detached(1, [3, 4])
    assert engine.state().unaccounted() == []
