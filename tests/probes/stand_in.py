"""A scheduler that has only what the probe reads, for calls that vLLM's own makes rarely or in other releases only."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from kvscope.engine.bench.clock import VirtualClock
from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.wire import decode, encode
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.probes.packer import Packer
from kvscope.monitor.probes.vllm.probe import Probe

ENGINE = "m@127.0.0.1:5757/0"


def with_vllm(monkeypatch: pytest.MonkeyPatch, **envs: str) -> None:
    """A vLLM that is imported, with these settings. Its requests do not count what steps in flight compute."""

    class Request:
        def __init__(self) -> None: ...

    parts = {"vllm.envs": envs, "vllm.v1": {}, "vllm.v1.request": {"Request": Request}}
    for name, attributes in {"vllm": {"__version__": "0.32.0"}, **parts}.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


class Block:
    """A block of the pool."""

    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt = block_id, 0
        self.block_hash: bytes | None = None
        self.is_null = block_id == 0

    @property
    def next_free_block(self) -> object:
        """Something, if it is in the queue of free blocks."""
        return None if self.ref_cnt else self


class Output(NamedTuple):
    """What a pass gives out: tokens by request id, and the requests that are new."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: Sequence[Any] = ()

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class StandInRequest(SimpleNamespace):
    """A request of ten tokens, which stands in queues by its priority."""

    def __init__(self, name: str, status: str, **more: Any) -> None:
        known = {"num_tokens": 10, "num_prompt_tokens": 10, "max_tokens": 5, "num_computed_tokens": 0}
        known |= {"num_output_tokens": 0, "priority": 0}
        super().__init__(request_id=name, status=SimpleNamespace(name=status), **known | more)

    def __lt__(self, other: StandInRequest) -> bool:
        return bool(self.priority < other.priority)

    def is_finished(self) -> bool:
        return str(self.status.name).startswith("FINISHED")


def request(name: str, status: str = "WAITING", **more: Any) -> Any:
    """One in this status, with other attributes than it has by default."""
    return StandInRequest(name, status, **more)


class Queue(list[Any]):
    """The waiting requests, the next one first."""

    def pop_request(self) -> Any:
        return self.pop(0)


def group(size: int = 16, spec: Any = None) -> Any:
    """The manager of a KV cache group."""

    class GroupManager:
        def __init__(self) -> None:
            self.kv_cache_group_id, self.block_size = 0, size
            self.kv_cache_spec = spec or SimpleNamespace()
            self.req_to_blocks: dict[str, list[Block]] = {}

        def allocate(self, request_id: str, pool: Any, count: int) -> list[Block]:
            blocks: list[Block] = pool.get_new_blocks(count)
            self.req_to_blocks.setdefault(request_id, []).extend(blocks)
            return blocks

        def free(self, request_id: str, pool: Any) -> None:
            pool.free_blocks(reversed(self.req_to_blocks.pop(request_id)))

    return GroupManager()


def _pool(blocks: int) -> Any:
    class Pool:
        def __init__(self) -> None:
            self.num_gpu_blocks, self.blocks = blocks, [Block(number) for number in range(blocks)]
            self.free_block_queue = SimpleNamespace(num_free_blocks=blocks - 1)

        def get_new_blocks(self, count: int) -> list[Block]:
            free = [block for block in self.blocks[1:] if not block.ref_cnt][:count]
            self._take(free)
            return free

        def touch(self, blocks: Sequence[Block]) -> None:
            self._take(blocks)

        def _take(self, taken: Sequence[Block]) -> None:
            for block in taken:
                self.free_block_queue.num_free_blocks -= block.ref_cnt == 0
                block.ref_cnt += 1

        def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
            for block in ordered_blocks:
                block.ref_cnt -= 1
                self.free_block_queue.num_free_blocks += block.ref_cnt == 0

        def move_block_hashes(self, src_block: Block, dst_block: Block) -> None:
            dst_block.block_hash, src_block.block_hash = src_block.block_hash, None
            self._take([src_block, dst_block])

    return Pool()


def _coordinator(groups: Sequence[Any]) -> Any:
    class Coordinator:
        def __init__(self) -> None:
            self.single_type_managers = list(groups) or [group()]
            self.asked: list[dict[str, Any]] = []

        def get_num_blocks_to_allocate(
            self, request_id: str, num_tokens: int, num_encoder_tokens: int, apply_admission_cap: bool
        ) -> int:
            self.asked.append({"tokens": num_tokens, "encoder": num_encoder_tokens, "capped": apply_admission_cap})
            return -(-num_tokens // 16)

    return Coordinator()


class CacheManager:
    """The cache manager, whose calls a test makes itself."""

    def __init__(self, block_pool: Any, coordinator: Any) -> None:
        self.block_pool, self.coordinator, self.enable_caching = block_pool, coordinator, True

    @property
    def group(self) -> Any:
        """The manager of the first KV cache group."""
        return self.coordinator.single_type_managers[0]


def _manager(pool: Any, coordinator: Any) -> Any:
    class Manager(CacheManager):
        def pop_blocks_for_free(self, request: Any) -> list[Block]:
            return list(reversed(self.group.req_to_blocks.pop(request.request_id)))

    return Manager(pool, coordinator)


def scheduler(blocks: int = 20, groups: Sequence[Any] = (), kv_groups: Sequence[Any] = (), **more: Any) -> Any:
    """One without requests. groups: managers, one by default. kv_groups: their specifications, for the description.

    Its pass does what a test has put in `within`, and then gives out `plan`. The connector keeps the blocks of `keeps`.
    A request that stops has the status `stops_as`.
    """
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="meta/llama", served_model_name=None, max_model_len=4096),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=512, policy="fcfs"),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=None,
    )
    pool, coordinator = _pool(blocks), _coordinator(groups)

    class Scheduler:
        def __init__(self) -> None:
            self.vllm_config, self.scheduler_config = config, config.scheduler_config
            self.block_size, self.max_model_len = 16, 4096
            self.max_num_scheduled_tokens, self.max_num_running_reqs = 512, 8
            self.kv_cache_config = SimpleNamespace(kv_cache_groups=list(kv_groups))
            self.kv_cache_manager = _manager(pool, coordinator)
            self.requests: dict[str, Any] = {}
            self.running: list[Any] = []
            self.waiting = Queue()
            self.plan, self.within = Output({}), lambda: None
            self.keeps: set[str] = set()
            self.stops_as = "FINISHED_STOPPED"

        def add_request(self, request: Any) -> None:
            self.requests[request.request_id] = request
            self.waiting.append(request)

        def schedule(self) -> Output:
            self.within()
            for one in self.plan.scheduled_new_reqs:
                self.waiting.remove(self.requests[one.req_id])
                self.running.append(self.requests[one.req_id])
            for name, tokens in self.plan.num_scheduled_tokens.items():
                self.requests[name].num_computed_tokens += tokens
            return self.plan

        def update_from_output(self, scheduler_output: Output, model_runner_output: Any) -> None: ...

        def _handle_stopped_request(self, request: Any) -> bool:
            self.running.remove(request)
            request.status.name = self.stops_as
            return bool(request.is_finished())

        def _try_schedule_encoder_inputs(self, request: Any, tokens: int) -> tuple[list[int], int, int]:
            return [], tokens, 0

        def _free_cow_retained_blocks(self, blocks: list[Block], fence_seq: int) -> None:
            pool.free_blocks(blocks)

        def finish_requests(self, request_id: str) -> None:
            self.requests[request_id].status.name = "FINISHED_ABORTED"
            self._free_request(self.requests[request_id])

        def _free_request(self, request: Any) -> None:
            if request.request_id not in self.keeps:
                self._free_blocks(request)

        def _free_blocks(self, request: Any) -> None:
            self.kv_cache_manager.group.free(request.request_id, pool)
            del self.requests[request.request_id]

        def _update_from_kv_xfer_finished(self, kv_connector_output: Any) -> None: ...

    made = Scheduler()
    vars(made).update(more)
    return made


class Probed:
    """The probe on a stand-in, and the ledger of what it reported."""

    def __init__(self, made: Any) -> None:
        self.scheduler, self.clock = made, VirtualClock()
        self.log = EventLog(self.clock)
        self.probe = Probe(made, self.log, b"key", self.clock)
        self.packer = Packer(self.log, ENGINE, self.probe.vitals)
        self.ledger = EngineLedger(ENGINE)
        self.probe.start()

    def drain(self) -> EngineLedger:
        """The ledger, with all that happened until now."""
        self.probe.flush()
        return self.received()

    def received(self) -> EngineLedger:
        """The ledger, with what the probe has handed over by itself."""
        for batch in self.packer.pack():
            self.ledger.apply(decode(encode(batch)))
        assert not self.probe.hooks.errors
        return self.ledger

    def step(self, tokens: dict[str, int], *new: str, seconds: float = 1.0) -> None:
        """A pass that gives these tokens, and the end of its step."""
        output = self.launch(tokens, *new)
        self.clock.sleep(seconds)
        self.scheduler.update_from_output(output, None)

    def launch(self, tokens: dict[str, int], *new: str) -> Output:
        """The pass alone."""
        self.scheduler.plan = Output(tokens, [SimpleNamespace(req_id=name) for name in new])
        output: Output = self.scheduler.schedule()
        return output

    def arrive(self, name: str, **more: Any) -> Any:
        """A request reaches the scheduler."""
        self.scheduler.add_request(request(name, **more))
        return self.scheduler.requests[name]
