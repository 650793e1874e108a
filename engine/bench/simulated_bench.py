"""The load bench in virtual time: the same clients on a simulated engine, ten minutes in a second or a few."""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from pathlib import Path

from ..config import EngineConfig
from ..core.intake import Refused
from ..models import load_model
from ..requests.request import Output, SamplingParams
from .load_bench import BenchLoad, ClientArrival, ClientRecord, client_arrivals
from .simulated_engine import SimulatedEngine


class SimulatedClients:
    """The clients of `load`, in the virtual time of `engine`, and what each of them has seen."""

    def __init__(self, load: BenchLoad, engine: SimulatedEngine) -> None:
        self.seen: list[ClientRecord] = []
        self._load = load
        self._engine = engine
        self._params = SamplingParams(temperature=0, max_tokens=load.output_len, ignore_eos=True)
        self._open: dict[int, tuple[ClientRecord, ClientArrival]] = {}
        self._queue: deque[ClientArrival] = deque()
        """Clients beyond max_concurrency."""

    def arrive(self, arrival: ClientArrival) -> None:
        """Submit the client's request, or queue the client behind `max_concurrency` others."""
        if len(self._open) == self._load.max_concurrency:
            self._queue.append(arrival)
            return
        client = ClientRecord(self._engine.now_s, prompt_tokens=len(arrival.prompt))
        self.seen.append(client)
        try:
            number = self._engine.submit(f"bench-{len(self.seen)}", arrival.prompt, self._params)
        except Refused as error:
            client.error = str(error)
            self._end(client, "failed")
            return
        self._open[number] = client, arrival
        if self._load.timeout_s < math.inf:
            self._engine.at(self._load.timeout_s, lambda: self._leave(number, "timed out"))

    def receive(self, outputs: list[Output]) -> None:
        """Hand the engine's outputs to the clients that are still there."""
        for output in outputs:
            if output.number not in self._open:
                continue
            client, arrival = self._open[output.number]
            if output.sampled:
                client.came.append(self._engine.now_s)
                client.output_tokens += len(output.sampled)
            if output.status is not None:
                client.error = output.error
                del self._open[output.number]
                self._end(client, "failed" if output.error else "completed")
            elif len(client.came) == arrival.leaves_after:
                self._leave(output.number, "disconnected")

    def time_out(self) -> None:
        """End the clients that are still there, and those that were queued."""
        self._queue.clear()
        for number in list(self._open):
            self._leave(number, "timed out")

    def _leave(self, number: int, outcome: str) -> None:
        if number in self._open:
            self._engine.client_gone(number)
            self._end(self._open.pop(number)[0], outcome)

    def _end(self, client: ClientRecord, outcome: str) -> None:
        client.ended, client.outcome = self._engine.now_s, outcome
        if self._queue:
            self.arrive(self._queue.popleft())


def bench_simulated(load: BenchLoad, config: EngineConfig, seconds: float, journal: Path | None) -> list[ClientRecord]:
    """Run the load on an engine of `config` for `seconds` of virtual time, and keep its events in `journal`.

    Clients without their whole output by then have timed out. Raises ValueError for settings that do not fit.
    """
    engine = SimulatedEngine(config, load_model(config), journal=journal)
    clients = SimulatedClients(load, engine)
    try:
        for arrival in client_arrivals(load):
            engine.at(arrival.at_s, partial(clients.arrive, arrival))
        engine.run(seconds, clients.receive)
        clients.time_out()
    finally:
        engine.close()
    if not clients.seen:
        raise ValueError(
            f"no client came within the {seconds:g} s that are simulated: give more, or a higher --request-rate"
        )
    return clients.seen
