"""Blocks of the pool that something other than a request pins, and never unpins."""

from __future__ import annotations

from kvscope.monitor.contract.kinds import Release, Status
from kvscope.monitor.detectors.leak.external_pins import PINS_NEEDED
from tests.detectors.spoken import Spoken, value

PINS_CODE = "leak.external-pins"


def pin(scene: Spoken, block: int) -> None:
    """A request ends, and something pins its block."""
    scene.arrive(block, [block])
    scene.log.cached(block, [block], [1000 + block])
    scene.log.pinned([block])
    scene.log.finished(block, Status.FINISHED_STOPPED)
    scene.log.released(block, [block], Release.FINISHED)
    scene.say()
    scene.wait(1)


def unpin(scene: Spoken, block: int) -> None:
    scene.log.unpinned([block])
    scene.say()


def test_pins_that_are_taken_again_and_again_and_never_dropped() -> None:
    scene = Spoken()
    for block in (1, 2, 3):
        pin(scene, block)
    scene.wait(15)
    finding = scene.only(PINS_CODE)
    assert (finding.verdict, finding.severity, finding.missing) == ("likely", "warning", PINS_NEEDED)
    assert finding.culprits.blocks == [1, 2, 3]
    assert (value(finding, "blocks_held_by_pins_alone"), value(finding, "times_pinned")) == (3, 3)
    for block in (1, 2, 3):
        unpin(scene, block)
    scene.wait(15)
    assert not scene.firing(PINS_CODE)


def test_pins_of_half_of_the_pool_are_an_error() -> None:
    scene = Spoken()
    for block in range(1, 18):
        pin(scene, block)
    scene.wait(75)
    assert scene.only(PINS_CODE).severity == "error"


def test_a_prompt_that_is_pinned_once_is_meant_to_stay() -> None:
    scene = Spoken()
    scene.arrive(7, [1, 2, 3, 4])
    scene.log.pinned([1, 2, 3, 4])
    scene.log.finished(7, Status.FINISHED_STOPPED)
    scene.log.released(7, [1, 2, 3, 4], Release.FINISHED)
    scene.say()
    scene.wait(300)
    assert not scene.firing(PINS_CODE)


def test_pins_that_last_as_long_as_earlier_ones_are_no_leak() -> None:
    scene = Spoken()
    for block in (1, 2, 3):
        pin(scene, block)
    scene.wait(8)
    for block in (1, 2, 3):
        unpin(scene, block)
    for block in (4, 5, 6):
        pin(scene, block)
    scene.wait(20)
    assert not scene.firing(PINS_CODE)
    scene.wait(20)
    assert scene.firing(PINS_CODE)


def test_the_first_pins_of_an_engine_are_given_a_minute() -> None:
    scene = Spoken(settings=("leak.finished-held.unseen_times=6",))
    for block in (1, 2, 3):
        pin(scene, block)
    scene.wait(50)
    assert not scene.firing(PINS_CODE)
    scene.wait(20)
    assert scene.firing(PINS_CODE)
