"""Blocks that outlive their request: a KV connector still sends or fills them, until it is done or its lease ends."""

from __future__ import annotations

from kvscope.engine.connectors.base import KVConnector, KVLoad
from kvscope.engine.requests.request import Request
from kvscope.engine.scheduling.scheduler_state import SchedulerState
from kvscope.monitor.events.kinds import Holder, Load, Release, Status


class ConnectorTransfers:
    """Loads of `connector` (None: there is none) for requests, and the blocks that it keeps after their end."""

    def __init__(self, state: SchedulerState, connector: KVConnector | None, lease_s: float) -> None:
        self.connector = connector
        self.lease_ns = round(lease_s * 1e9)
        """How long the connector may keep a finished request's blocks (0: until it reports completion)."""
        self.deferred: dict[int, int] = {}
        """Finished requests whose blocks the connector still needs, with their lease deadline (0: none)."""
        self.loading: dict[int, KVLoad] = {}
        self._state = state

    def defers(self, request: Request, completed_normally: bool) -> bool:
        """Keep a finished request's blocks if the connector still needs them, and return whether it does."""
        log, number = self._state.log, request.number
        (blocks, *_) = self._state.manager.held(number)  # with a connector there is one KV group
        if number in self.loading:
            # The fetch still writes to them.
            log.free_deferred(number, blocks, Holder.CONNECTOR)
            self.deferred[number] = 0
            return True
        if completed_normally and self.connector is not None and self.connector.request_finished(request, blocks):
            deadline = log.clock.monotonic_ns() + self.lease_ns if self.lease_ns else 0
            log.free_deferred(number, blocks, Holder.CONNECTOR, lease_deadline_ns=deadline)
            self.deferred[number] = deadline
            return True
        return False

    def find_outside(self, request: Request, num_hits: int) -> int:
        """How many blocks after the prefix hit the connector could bring, never all: one token must be computed."""
        if self.connector is None:
            return 0
        return self.connector.find(request, num_hits, (request.num_tokens - 1) // self._state.manager.block_size)

    def start_load(self, request: Request, first: int, count: int) -> None:
        """Have the connector fetch `count` blocks from `first` on, and park the request meanwhile."""
        assert self.connector is not None
        (table,) = self._state.manager.tables[request.number]
        load = KVLoad(request, first, table[first : first + count])
        self.loading[request.number] = load
        self._state.park(request, Status.WAITING_FOR_REMOTE_KVS)
        self.connector.start_load(load)

    def take_loads(self) -> None:
        """Let the requests go on whose fetch has ended, with the tokens that it delivered."""
        assert self.connector is not None
        state = self._state
        for number, delivered in self.connector.loaded():
            request = state.requests[number]
            lost = "leak.remote-load-lost" if request.is_finished else "stuck.remote-load"
            if state.faults.triggers(lost, request.id):
                continue
            load = self.loading.pop(number)
            tokens = len(load.blocks) * state.manager.block_size
            state.log.remote_load(number, Load.DELIVERED if delivered else Load.FAILED, tokens)
            if request.is_finished:
                self._free_deferred(number, Release.ABORTED)
                continue
            if delivered:
                request.num_computed_tokens += tokens
                state.manager.advance(request)
            state.unpark(request)

    def take_completions(self, has_work: bool) -> None:
        """Free the blocks that the connector needs no longer, and those that it kept for longer than its lease."""
        if self.connector is None:
            return
        faults = self._state.faults
        if not has_work and self.deferred and faults.triggers("leak.idle-not-polled", ""):
            return
        for number in self.connector.completed():
            request = self._state.requests.get(number)
            if request is None or faults.triggers("leak.finished-held", request.id):
                continue
            if self.lease_ns and faults.triggers("leak.lease-burst", request.id):
                continue
            self._state.log.completion_delivered(number)
            self._free_deferred(number, Release.TRANSFER_DONE)
        if self.lease_ns:
            self._end_leases()

    def _end_leases(self) -> None:
        now = self._state.log.clock.monotonic_ns()
        assert self.connector is not None
        for number in [n for n, deadline in self.deferred.items() if 0 < deadline <= now]:
            self.connector.lease_ended(number)
            self._free_deferred(number, Release.LEASE_EXPIRED)

    def _free_deferred(self, number: int, reason: Release) -> None:
        del self.deferred[number]
        self._state.free(self._state.requests.pop(number), reason)
