"""Blocks and slots without an owner, as an engine's own audits report them (written/lost_blocks.py)."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.engine_log import Log
from tests.detectors.scenes import value


def found(*lines: str) -> list[FindingReport]:
    """All findings above information, from a log of these lines."""
    watch = Pipeline()
    watch.feed(Log("sglang.log", datetime(2026, 11, 21, tzinfo=UTC)).records(lines))
    watch.settle()
    return [finding for finding in watch.findings() if finding.severity != "info"]


SLOTS = "UserWarning: req_to_token_pool memory leak detected!available_size=3756, total_size=3757"


def test_a_request_slot_without_a_request_is_dated_by_the_line_of_the_audit() -> None:
    (finding,) = found(f"[2026-11-20 00:37:19 TP0] {SLOTS}")
    assert (finding.code, finding.verdict) == ("stuck.slots-exhausted", "likely")
    assert finding.since is not None
    assert finding.since.startswith("2026-11-20T00:37:19")
    assert value(finding, "missing_slots") == 1
    (undated,) = found(SLOTS)
    assert undated.since is None


def pool_audit(available: int) -> str:
    """The audit of a pool of 270,331 tokens, of which 269,628 are evictable."""
    return (
        "ValueError: token_to_kv_pool_allocator memory leak detected! self.max_total_num_tokens=270331,"
        f" available_size={available}, evictable_size=269628, protected_size=0"
    )


@pytest.mark.parametrize(
    ("available", "code"), [(702, "leak.unaccounted"), (703, "stuck.slots-exhausted"), (704, "corrupt.double-free")]
)
def test_a_slot_beside_one_token_without_an_owner_is_part_of_that_leak(available: int, code: str) -> None:
    """703 are free in a sound pool. A surplus, and a slot, are two defects."""
    assert code in [finding.code for finding in found(pool_audit(available), SLOTS)]
    assert ("stuck.slots-exhausted" in [each.code for each in found(pool_audit(available), SLOTS)]) == (available > 702)


def test_a_pool_audit_whose_sums_are_cut_off_hides_no_slot() -> None:
    findings = found("ValueError: token_to_kv_pool_allocator memory leak detected!", SLOTS)
    assert [(finding.code, finding.verdict) for finding in findings] == [("stuck.slots-exhausted", "likely")]


def test_leases_that_ran_out_are_told_as_the_first_line_has_them() -> None:
    lines = [
        f"WARNING 11-20 10:12:{number} [nixl_connector.py:1180] Releasing expired KV blocks for request"
        f" chatcmpl-{number} which were retrieved by 0 decode worker(s) within {seconds} seconds."
        for number, seconds in ((21, 480), (22, 240))
    ]
    (finding,) = found(*lines)
    assert (finding.code, finding.verdict, value(finding, "lease")) == ("leak.lease-burst", "likely", 480)
    assert value(finding, "expired_leases") == 2


@pytest.mark.parametrize(("pinned", "leaks"), [(18, True), (17, False)])
def test_a_tier_leaks_pins_where_every_item_is_pinned(pinned: int, leaks: bool) -> None:
    findings = found(f"LMCache WARNING: Local CPU backend state: total_items=18, pinned_count={pinned}.")
    assert [(finding.code, finding.verdict) for finding in findings] == [("leak.external-pins", "likely")] * leaks


def test_allocations_that_fail_in_a_tier_are_shown_from_the_first_line_on() -> None:
    failed = "LMCache WARNING: Failed to allocate memory block of size 33554432 because no memory is available"
    (finding,) = found("LMCache INFO: started", failed, failed)
    assert (finding.code, finding.position) == ("stuck.outer-tier", "sglang.log:2")


@pytest.mark.parametrize("stores", [True, False])
def test_lookups_miss_in_a_tier_that_stores(stores: bool) -> None:
    """One that stores nothing has nothing to hit."""
    found_none = "LMCache INFO: Reqid: cmpl-1, Total tokens 8211, LMCache hit tokens: 0, need to load: 0"
    lookup = f"[2026-11-20 10:00:01,123] {found_none}"
    stored = "LMCache INFO: Stored 8192 out of total 8192 tokens. size: 1.0000 gb, cost 100.1 ms"
    findings = found("[Bug]: LMCache has a cache miss for the same prompt", *[stored] * stores, lookup, lookup)
    assert [finding.verdict for finding in findings if finding.code == "collapse.outer-hits"] == [
        "likely" if stores else "cannot-tell"
    ]
