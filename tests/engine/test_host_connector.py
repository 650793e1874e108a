"""KV that went to the host and came back gives the tokens that KV in the pool gives, and no block stays behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvscope.engine.blocks.prefix_hashes import DIGEST_BYTES
from kvscope.engine.config import EngineConfig
from kvscope.engine.connectors.base import KVLoad
from kvscope.engine.connectors.host import HostConnector
from kvscope.engine.core.assembly import EventStream
from kvscope.engine.faults import Faults
from kvscope.engine.requests.request import Request, SamplingParams
from kvscope.engine.serving.llm import LLM
from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.kinds import Tier, TierOp
from kvscope.monitor.ledger.engine_state import EngineState
from kvscope.monitor.probes.packer import Packer, Vitals
from tests.engine.process import wait_for

BLOCK = 4
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
STREAM = EventStream("tiny@test/0", "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")


def digest(name: str) -> bytes:
    """Return a digest of the length that prefixes have."""
    return name.encode().ljust(DIGEST_BYTES, b"-")


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(256) for _ in range(rng.randint(30, 60))] for _ in range(count)]


@contextmanager
def host_llm(**settings: Any) -> Iterator[LLM]:
    with LLM(block_size=BLOCK, kv_connector="host", stream=STREAM, **settings) as llm:
        yield llm


def tokens(llm: LLM, asked: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(asked, GREEDY)]


def settle(llm: LLM) -> None:
    """Until the connector needs nothing of the pool any more."""

    def settled() -> bool:
        llm.core.step()
        return not llm.core.scheduler.deferred

    wait_for(settled)


def ledger_state(llm: LLM) -> EngineState:
    """The books that the drain thread keeps, once they have all that the engine said."""
    publisher = llm.core.publisher
    assert publisher is not None
    wait_for(lambda: not llm.core.log.flushed)
    return publisher.packer.shadow


def test_a_prefix_from_the_host_gives_the_same_tokens() -> None:
    asked = prompts(random.Random(1), 6)
    with LLM(block_size=BLOCK, num_gpu_blocks_override=400, enable_prefix_caching=False) as plain:
        expected = tokens(plain, asked)
    with host_llm(num_gpu_blocks_override=400) as llm:
        assert tokens(llm, asked) == expected
        settle(llm)
        assert llm.core.pool.counts()[2] == 0
        assert llm.core.pool.reset_prefix_cache()
        assert tokens(llm, asked) == expected
        settle(llm)
        # All but a prompt's last tokens came from the host, and nothing from the pool.
        brought = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in asked)
        assert llm.core.scheduler.prefix_hits == 0
        wait_for(lambda: ledger_state(llm).totals.hit_tokens == brought)


def test_under_pressure_on_pool_and_host_the_tokens_stay_the_same() -> None:
    rng = random.Random(2)
    asked = prompts(rng, 8)
    asked += [prompt[:20] + [rng.randrange(256) for _ in range(20)] for prompt in asked]
    with LLM(block_size=BLOCK, num_gpu_blocks_override=800, enable_prefix_caching=False) as plain:
        expected = tokens(plain, asked)
    with host_llm(num_gpu_blocks_override=45, max_num_batched_tokens=24) as llm:
        for _ in range(3):
            order = list(range(len(asked)))
            rng.shuffle(order)
            assert tokens(llm, [asked[i] for i in order]) == [expected[i] for i in order]
        settle(llm)
        assert llm.core.scheduler.num_preemptions > 0
        assert llm.core.pool.counts()[2] == 0
        store = llm.core.connector
        assert store is not None
        assert 0 < store.num_stored <= store.capacity
        wait_for(lambda: ledger_state(llm).tiers[Tier.HOST].used == store.num_stored)
        assert ledger_state(llm).tiers[Tier.HOST].operations[TierOp.EVICTED] > 0


class Store:
    """A connector over a tensor that stands for the pool's KV, and the books of what it says."""

    def __init__(self, capacity: int, fail: bool = False, faults: Sequence[str] = ()) -> None:
        self.kv = torch.arange(100, dtype=torch.float32).reshape(1, 1, 100)
        self.log = EventLog()
        self.packer = Packer(self.log, "e", lambda: Vitals(-1, 0, 0, 0, 0, 0, 0))
        self.fail = fail
        self.connector = HostConnector(
            self.gather, self.scatter, block_size=BLOCK, capacity=capacity, log=self.log, faults=Faults.parse(faults)
        )
        self._numbers = 0

    def gather(self, blocks: list[int]) -> torch.Tensor:
        if self.fail:
            raise RuntimeError("no memory")
        return self.kv[:, :, blocks]

    def scatter(self, blocks: list[int], kv: torch.Tensor) -> None:
        if self.fail:
            raise RuntimeError("no memory")
        self.kv[:, :, blocks] = kv

    def find(self, digests: list[bytes]) -> int:
        return self.connector.find(asking(digests), 0, len(digests))

    def load(self, digests: list[bytes], blocks: list[int]) -> list[float]:
        """What is in these blocks once the fetch has ended."""
        self.connector.start_load(KVLoad(asking(digests), 0, blocks))
        ended: list[tuple[int, bool]] = []
        wait_for(lambda: bool(ended.extend(self.connector.loaded()) or ended))
        assert ended == [(9, not self.fail)]
        return self.kv[:, :, blocks].flatten().tolist()

    def finish(self, digests: list[bytes], blocks: list[int]) -> int:
        """A request with these full blocks, and a part of one more, ends; its number once it is named completed."""
        self._numbers += 1
        request = Request(self._numbers, "r", [0] * (len(digests) * BLOCK + 1), SamplingParams())
        request.digests = list(digests)
        request.num_computed_tokens = request.num_tokens
        if not self.connector.request_finished(request, [*blocks, 99]):
            return 0
        done: list[int] = []
        wait_for(lambda: bool(done.extend(self.connector.completed()) or done))
        return done[0]


def asking(digests: list[bytes]) -> Request:
    """Request 9, which begins with these blocks."""
    request = Request(9, "r", [0] * (len(digests) * BLOCK + 1), SamplingParams())
    request.digests = list(digests)
    return request


@contextmanager
def store(capacity: int, fail: bool = False, faults: Sequence[str] = ()) -> Iterator[Store]:
    made = Store(capacity, fail, faults)
    try:
        yield made
    finally:
        made.connector.close()


def test_the_least_recently_used_goes_first_and_a_prefix_loses_its_end_first() -> None:
    with store(capacity=4) as s:
        a, b, c = [digest("a1"), digest("a2")], [digest("b1"), digest("b2")], [digest("c1")]
        assert s.finish(a, [1, 2]) == 1
        assert s.finish(b, [3, 4]) == 2
        assert s.find(a) == 2
        assert s.load(a, [11, 12]) == [1.0, 2.0]
        assert s.finish(c, [5]) == 3
        assert (s.find(a), s.find(b), s.find(c)) == (2, 1, 1)
        assert s.find([digest("never"), *a]) == 0
        assert s.finish(a, [7, 8]) == 0  # nothing new to keep: nothing is held
        s.kv.zero_()
        assert s.load(a, [13, 14]) == [1.0, 2.0]


def test_what_a_fetch_waits_for_is_not_evicted() -> None:
    with store(capacity=2) as s:
        a = [digest("a1"), digest("a2")]
        assert s.finish(a, [1, 2]) == 1
        s.connector.start_load(KVLoad(asking(a), 0, [11, 12]))
        assert s.finish([digest("b1")], [3]) == 0  # nothing could make room for it
        wait_for(lambda: bool(s.connector.loaded()))
        assert s.finish([digest("b1")], [3]) == 3
        assert (s.find(a), s.find([digest("b1")])) == (1, 1)


def test_a_copy_that_fails_keeps_nothing_and_gives_the_blocks_back(caplog: pytest.LogCaptureFixture) -> None:
    with store(capacity=4, fail=True) as s:
        assert s.finish([digest("a")], [1]) == 1
        assert s.find([digest("a")]) == 0
    assert "no memory" in caplog.text


def test_it_needs_the_prefix_cache_to_name_what_it_keeps() -> None:
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        EngineConfig(kv_connector="host", enable_prefix_caching=False)


def test_a_lease_brings_back_what_no_completion_does() -> None:
    """What the runbook of leak.finished-held advises helps."""
    asked = prompts(random.Random(5), 4)
    for lease, comes_back in ((0.0, False), (0.3, True)):
        with host_llm(num_gpu_blocks_override=400, kv_lease_seconds=lease, faults=("leak.finished-held",)) as llm:
            tokens(llm, asked)
            assert len(llm.core.scheduler.deferred) == 4
            if comes_back:
                settle(llm)
            else:
                for _ in range(50):
                    llm.core.step()
            assert (llm.core.pool.counts()[2] == 0) == comes_back


def test_a_copy_that_outlives_its_lease_is_not_kept() -> None:
    """The blocks were taken back, and may hold another request's KV by the time they are read."""
    go = threading.Event()
    store = HostConnector(
        lambda blocks: gathered(go, blocks), lambda *_: None, block_size=BLOCK, capacity=10, log=EventLog()
    )
    try:
        late, kept = finished(1), finished(2)
        assert store.request_finished(late, [1])
        assert store.request_finished(kept, [2])
        store.lease_ended(late.number)
        go.set()
        done: list[int] = []
        wait_for(lambda: bool(done.extend(store.completed()) or done))
        assert done == [kept.number]
        assert (store.find(late, 0, 1), store.find(kept, 0, 1)) == (0, 1)
    finally:
        go.set()
        store.close()


def gathered(go: threading.Event, blocks: list[int]) -> torch.Tensor:
    go.wait()
    return torch.zeros(1, 2, len(blocks), BLOCK, 1, 2)


def finished(number: int) -> Request:
    """A request with one full block computed."""
    request = Request(number, f"r-{number}", [number] * BLOCK, SamplingParams())
    request.num_computed_tokens = BLOCK
    request.digests = [bytes([number]) * 16]
    return request
