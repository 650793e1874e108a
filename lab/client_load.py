"""Clients in virtual time: when they come, what they ask, and how they leave."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Final, Protocol

from kvscope.engine.core.intake import Refused
from kvscope.engine.requests.request import Output, SamplingParams
from kvscope.engine.requests.structured_output import StructuredOutputs

TOKENS: Final = (32, 256)
"""Prompts are drawn from the ids between: bytes, none of them special."""
MANY_TOKENS: Final = 4096
"""Longer prompts are drawn all at once, which takes a hundredth of the time."""


@dataclass(frozen=True)
class Clients:
    """Clients of one kind, each named `name-N`. They come at `times`, or `rate` a second as a Poisson process, or they
    are `at_once`, and each asks again `pause_s` after its answer. They come from `since_s` until `until_s`.

    prompt, output: tokens, from least to most, where the output is as long as requested. prefixes: how many beginnings
    of `prefix` tokens a `family` has, one of which each prompt has before its own tokens. leave: the share that goes
    away before the end of its answer. leave_fetching: all go away as soon as KV is fetched for them. patience_s: how
    long a client waits for its whole answer. lingers_s: it reads so slowly that its connection ends this long after the
    answer. priority: from least to most, drawn. regex: the pattern of the output. context: above 0, the clients are
    agents: each prompt is all of the conversation so far and new tokens, until it has that many tokens, when the agent
    begins a new one.
    """

    name: str = "r"
    times: tuple[float, ...] = ()
    rate: float = 0.0
    at_once: int = 0
    pause_s: float = 0.0
    since_s: float = 0.0
    until_s: float = 20.0
    prompt: tuple[int, int] = (40, 120)
    output: tuple[int, int] = (10, 40)
    prefixes: int = 0
    prefix: int = 0
    family: str = ""
    leave: float = 0.0
    leave_fetching: bool = False
    patience_s: float = inf
    lingers_s: float = 0.0
    priority: tuple[int, int] = (0, 0)
    regex: str = ""
    context: int = 0


class ServedEngine(Protocol):
    """An engine in virtual time as its clients see it."""

    @property
    def now_s(self) -> float:
        """Seconds on the virtual clock."""
        ...

    @property
    def scheduler(self) -> HasParked:
        """Its scheduler."""
        ...

    def at(self, seconds: float, call: Callable[[], None], /) -> None:
        """Have `call` made so long after now."""
        ...

    def submit(self, name: str, prompt: list[int], params: SamplingParams, priority: int, /) -> int:
        """Take a request in and return its number. Raises Refused."""
        ...

    def client_gone(self, number: int, /) -> None:
        """Abort the request of that number."""
        ...


class HasParked(Protocol):
    """A scheduler that shows which requests wait for something outside of it."""

    @property
    def parked(self) -> Iterable[int]:
        """Their numbers."""
        ...


class Crowd:
    """All the clients of a run: hand it what the engine gives at each pass."""

    def __init__(self, engine: ServedEngine, load: Iterable[Clients], seed: int) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._began = engine.now_s
        self._come: Counter[str] = Counter()
        self._asking: dict[int, tuple[Clients, int]] = {}
        """By number: who asks, and after how many tokens it leaves (0: never)."""
        self._had: Counter[int] = Counter()
        self.names: dict[int, str] = {}
        """The id of every request that was taken in, by its number."""
        self.numbers: dict[str, int] = {}
        """And the other way."""
        self.asked_s: dict[int, float] = {}
        """When each was asked for, in seconds since the run began."""
        self.refused = 0
        self.asked = 0
        self._closed = False
        self._conversations: dict[int, list[int]] = {}
        """Agents with a request, by number: all tokens so far."""
        for clients in load:
            for at_s in self._arrivals(clients):
                engine.at(at_s, partial(self._ask, clients))

    def _arrivals(self, clients: Clients) -> list[float]:
        if clients.at_once:
            return [clients.since_s] * clients.at_once
        if not clients.rate:
            return list(clients.times)
        moments = []
        at_s = clients.since_s + self._rng.expovariate(clients.rate)
        while at_s < clients.until_s:
            moments.append(at_s)
            at_s += self._rng.expovariate(clients.rate)
        return moments

    def close(self) -> None:
        """Let no client come or leave from now on: those that asked wait for their answers."""
        self._closed = True

    def _prompt(self, clients: Clients) -> list[int]:
        beginning: list[int] = []
        if clients.prefixes:
            which = self._rng.randrange(clients.prefixes)
            beginning = _tokens(random.Random(f"{clients.family} {which}"), clients.prefix)
        return beginning + _tokens(self._rng, self._rng.randint(*clients.prompt))

    def _ask(self, clients: Clients, conversation: Sequence[int] = ()) -> None:
        if self._closed:
            return
        name = f"{clients.name}-{self._come[clients.name]}"
        self._come[clients.name] += 1
        wanted = self._rng.randint(*clients.output)
        params = SamplingParams(
            max_tokens=wanted,
            ignore_eos=True,
            structured_outputs=StructuredOutputs(regex=clients.regex) if clients.regex else None,
        )
        prompt, priority = [*conversation, *self._prompt(clients)], self._rng.randint(*clients.priority)
        leaves_after = self._rng.randint(1, max(1, wanted - 1)) if self._rng.random() < clients.leave else 0
        self.asked += 1
        try:
            number = self._engine.submit(name, prompt, params, priority)
        except Refused:
            self.refused += 1
            if conversation:  # it has grown beyond what the engine takes
                self._next(clients)
            return
        if clients.context:
            self._conversations[number] = prompt
        self.names[number] = name
        self.asked_s[number] = self._engine.now_s - self._began
        self.numbers[name] = number
        self._asking[number] = clients, leaves_after
        if clients.patience_s < inf:
            self._engine.at(clients.patience_s, partial(self._leave, number))

    def receive(self, outputs: list[Output]) -> None:
        """Take the outputs of one pass, and note which requests are being fetched."""
        for output in outputs:
            if output.number not in self._asking:
                continue
            leaves_after = self._asking[output.number][1]
            self._had[output.number] += len(output.sampled)
            if output.number in self._conversations:
                self._conversations[output.number] += [one.token_id for one in output.sampled]
            if output.status is not None:
                self._answered(output.number)
            elif leaves_after and self._had[output.number] >= leaves_after:
                self._leave(output.number)
        for number in list(self._engine.scheduler.parked):
            if number in self._asking and self._asking[number][0].leave_fetching:
                self._leave(number)

    def _answered(self, number: int) -> None:
        clients, _ = self._asking.pop(number)
        if clients.lingers_s:
            self._engine.at(clients.lingers_s, partial(self._engine.client_gone, number))
        self._next(clients, self._conversations.pop(number, ()))

    def _leave(self, number: int) -> None:
        if number in self._asking and not self._closed:
            self._engine.client_gone(number)
            self._conversations.pop(number, None)
            self._next(self._asking.pop(number)[0])

    def _next(self, clients: Clients, conversation: Sequence[int] = ()) -> None:
        """One of those that ask again and again has its place free."""
        if clients.at_once and self._engine.now_s - self._began + clients.pause_s < clients.until_s:
            goes_on = conversation if len(conversation) < clients.context else ()
            ask: Callable[[], None] = partial(self._ask, clients, goes_on)
            if clients.pause_s:
                self._engine.at(clients.pause_s, ask)
            else:
                ask()


_BYTES_TO_TOKENS: Final = bytes(TOKENS[0] + each % (TOKENS[1] - TOKENS[0]) for each in range(256))


def _tokens(rng: random.Random, count: int) -> list[int]:
    if count > MANY_TOKENS:
        return list(rng.randbytes(count).translate(_BYTES_TO_TOKENS))
    return [rng.randrange(*TOKENS) for _ in range(count)]
