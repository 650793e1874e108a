"""Writes down, after each call of a scheduler, what the probe reported and what vLLM's tables hold."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.wire import encode
from kvscope.monitor.probes.packer import Packer
from kvscope.monitor.probes.vllm.probe import Probe
from tests.probes.decisions import Decisions

ENGINE = "vllm@127.0.0.1:0/0"


class RunRecord:
    """Of `scheduler`, under a probe of its own. Each record is a msgpack map in `file` after its length, of four bytes.

    every: after how many calls one is written.
    """

    def __init__(self, scheduler: Any, file: BinaryIO, every: int = 1) -> None:
        self.log = EventLog(time)
        self.probe = Probe(scheduler, self.log, b"test")
        self.probe.start()
        self.decisions = Decisions(scheduler)
        self._packer = Packer(self.log, ENGINE, self.probe.vitals)
        self._scheduler = scheduler
        self._file = file
        self._every = every
        self._calls = 0

    def is_audited(self) -> bool:
        """Whether an audit is over. Its slices take their time, however quick steps are; after a loss none ends."""
        return bool(self._packer.shadow.audit_cycles or self.probe.hooks.errors or self.log.dropped_batches)

    def write(self, *, after_schedule: bool = False) -> None:
        self._calls += 1
        if self._calls % self._every:
            return
        scheduler, manager = self._scheduler, self._scheduler.kv_cache_manager
        pool = manager.block_pool
        managers = [one for one in manager.coordinator.single_type_managers if one.block_pool is pool]
        self.probe.flush()
        now = {
            "frames": [encode(batch) for batch in self._packer.pack()],
            "refs": [block.ref_cnt for block in pool.blocks],
            "hashed": [block.block_hash is not None for block in pool.blocks],
            "tables": {
                i: [b.block_id for one in managers for b in one.req_to_blocks.get(i, ()) if not b.is_null]
                for i in scheduler.requests
            },
            "decisions": {i: cause for i, cause in self.decisions.last.items() if i in scheduler.requests},
            "scheduled": after_schedule,
            "statuses": {i: request.status.name for i, request in scheduler.requests.items()},
            "free": pool.get_num_free_blocks(),
            "errors": self.probe.hooks.errors,
            "fences": hasattr(manager, "pop_blocks_for_free"),
        }
        encoded = msgspec.msgpack.encode(now)
        self._file.write(len(encoded).to_bytes(4, "little") + encoded)


@contextlib.contextmanager
def unhooked_afterwards(scheduler: Any) -> Iterator[None]:
    """Hooks stay in vLLM's classes: one process has one probe, but these runs share theirs."""
    manager = scheduler.kv_cache_manager
    managers, queues = manager.coordinator.single_type_managers, (scheduler.waiting, scheduler.connector)
    kinds = {kind for one in (scheduler, manager, manager.block_pool, *managers, *queues) for kind in type(one).__mro__}
    before = [(kind, name, value) for kind in kinds - {object} for name, value in vars(kind).items() if callable(value)]
    yield
    for kind, name, value in before:
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)
