"""A load on an engine, and what its clients see of it: kvscope engine bench.

The clients are real ones: each asks over HTTP and reads the stream, and one that gives up closes its connection, which
is all that the server sees of it. --offline asks an engine in this process instead, without HTTP between. --simulate
does so in virtual time, where ten minutes pass in a second or a few.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import httpx2
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..config import EngineConfig

PROMPT_TOKEN_IDS: Final = (32, 256)
"""Prompts are drawn from the ids between: there in any vocabulary, and none of them special."""
PERCENTILES: Final = (50, 90, 99)
OUTCOMES: Final = ("completed", "timed out", "disconnected", "failed")


class RequestFailed(Exception):
    """The server refused a request, or broke off."""


@dataclass(frozen=True)
class BenchLoad:
    """The load on the engine. Raises ValueError, naming the setting and what it may be.

    request_rate: arrivals a second, a Poisson process (infinite: all at once). max_concurrency: requests at once at
    most, where the wait for a place is no part of a request's times. prefix_len: tokens that all prompts begin with,
    before the input_len of their own. timeout_s: a client waits so long for its whole answer. disconnect: the share of
    clients that go away before the end of theirs. seed: of all that is drawn.
    """

    num_prompts: int = 100
    request_rate: float = math.inf
    max_concurrency: int | None = None
    input_len: int = 128
    output_len: int = 64
    prefix_len: int = 0
    timeout_s: float = math.inf
    disconnect: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value} and must be at least 1")
        for name in ("request_rate", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)} and must be above 0")
        if self.prefix_len < 0:
            raise ValueError(f"prefix_len is {self.prefix_len} and must be 0 or above")
        if not 0 <= self.disconnect <= 1:
            raise ValueError(f"disconnect is {self.disconnect} and must be 0 to 1, a share of the clients")


@dataclass(frozen=True)
class ClientArrival:
    """One client: when it comes, in seconds from the beginning, and after how many tokens it goes away, if it does."""

    at_s: float
    prompt: list[int]
    leaves_after: int | None


def client_arrivals(load: BenchLoad) -> Iterator[ClientArrival]:
    """Yield the clients of a load: the same for the same seed."""
    rng = random.Random(load.seed)
    prefix = [rng.randrange(*PROMPT_TOKEN_IDS) for _ in range(load.prefix_len)]
    at_s = 0.0
    for _ in range(load.num_prompts):
        prompt = prefix + [rng.randrange(*PROMPT_TOKEN_IDS) for _ in range(load.input_len)]
        leaves_after = rng.randint(1, max(1, load.output_len - 1)) if rng.random() < load.disconnect else None
        yield ClientArrival(at_s, prompt, leaves_after)
        at_s += rng.expovariate(load.request_rate) if load.request_rate < math.inf else 0.0


@dataclass
class ClientRecord:
    """The record of one client. Times are seconds of time.perf_counter, or of virtual time."""

    began: float
    ended: float = 0.0
    outcome: str = "completed"
    error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the server counts them, or as many as came for an answer that did not end."""
    came: list[float] = field(default_factory=list)
    """When each piece of the answer came."""


class BenchTarget(Protocol):
    """The target of a load."""

    def ask(self, prompt: list[int], output_len: int, seen: ClientRecord) -> AsyncGenerator[None]:
        """Yield once for each piece of the answer. Closing it before its end is going away. Raises Failed."""
        ...


class OverHTTP:
    """The server at `base_url`, which serves `model`."""

    def __init__(self, client: httpx2.AsyncClient, base_url: str, model: str) -> None:
        self._client = client
        self._url = f"{base_url}/v1/completions"
        self._model = model

    async def ask(self, prompt: list[int], output_len: int, seen: ClientRecord) -> AsyncGenerator[None]:
        """Open a connection for a client, from its request to its end."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._client.stream("POST", self._url, json=body) as answer:
                if answer.status_code != httpx2.codes.OK:
                    raise RequestFailed(f"HTTP {answer.status_code}: {(await answer.aread()).decode(errors='replace')}")
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        return
                    if not line.startswith("data: "):
                        continue
                    chunk: dict[str, Any] = msgspec.json.decode(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise RequestFailed(chunk["error"]["message"])
                    if chunk.get("choices"):
                        yield
                    if chunk.get("usage"):
                        seen.output_tokens = chunk["usage"]["completion_tokens"]
                raise RequestFailed("the server broke off before the answer's end")
        except (httpx2.HTTPError, msgspec.DecodeError) as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error


async def bench_over_http(load: BenchLoad, base_url: str) -> list[ClientRecord]:
    """Run the load on the server at base_url. Raises ValueError if there is none."""
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    base_url = base_url.rstrip("/").removesuffix("/v1")
    # A client's patience is the load's, and a connection is never one that another has used.
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(timeout=None, limits=limits) as client:
        try:
            answer = await client.get(f"{base_url}/v1/models", timeout=10)
            model = answer.raise_for_status().json()["data"][0]["id"]
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, LookupError) as error:
            raise ValueError(f"no engine answers at {base_url}/v1/models: {error or type(error).__name__}") from error
        return await run_clients(load, OverHTTP(client, base_url, model))


async def bench_offline(load: BenchLoad, config: EngineConfig) -> list[ClientRecord]:
    """Run the load on an engine of `config` in this process. Raises ValueError for settings that do not fit."""
    # Only here: torch takes seconds to import, and a client over HTTP has no use for it.
    from ..core.engine_core import EngineCore
    from ..core.intake import Refused
    from ..models import load_model
    from ..requests.request import SamplingParams
    from ..serving.frontend import EngineError, FrontEnd

    class InProcess:
        async def ask(self, prompt: list[int], output_len: int, seen: ClientRecord) -> AsyncGenerator[None]:
            params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
            try:
                texts = await front_end.submit([f"bench-{id(seen)}"], [prompt], params, 0)
            except Refused as error:
                raise RequestFailed(str(error)) from error
            try:
                while (delta := await texts.next()) is not None:
                    seen.output_tokens = texts.completion_tokens
                    if delta.sampled:
                        yield
            except EngineError as error:
                raise RequestFailed(str(error)) from error
            finally:
                texts.close(client_gone=True)

    core = EngineCore(config, load_model(config))
    try:
        front_end = FrontEnd(core)
        front_end.start(lambda: None)
        return await run_clients(load, InProcess())
    finally:
        core.close()


async def run_clients(load: BenchLoad, target: BenchTarget) -> list[ClientRecord]:
    """Let the clients come, and wait until the last has gone."""
    places = asyncio.Semaphore(load.max_concurrency or load.num_prompts)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("requests", total=load.num_prompts, tokens=0)
        tokens = 0

        async def serve(arrival: ClientArrival) -> ClientRecord:
            nonlocal tokens
            async with places:
                seen = await _run_client(load, target, arrival)
            tokens += seen.output_tokens
            progress.update(bar, advance=1, tokens=tokens)
            return seen

        began = time.perf_counter()
        clients = []
        async with asyncio.TaskGroup() as group:
            for arrival in client_arrivals(load):
                await asyncio.sleep(max(0.0, began + arrival.at_s - time.perf_counter()))
                clients.append(group.create_task(serve(arrival)))
    return [client.result() for client in clients]


async def _run_client(load: BenchLoad, target: BenchTarget, arrival: ClientArrival) -> ClientRecord:
    seen = ClientRecord(time.perf_counter(), prompt_tokens=len(arrival.prompt))
    patience = load.timeout_s if load.timeout_s < math.inf else None
    try:
        async with asyncio.timeout(patience), aclosing(target.ask(arrival.prompt, load.output_len, seen)) as answer:
            async for _ in answer:
                seen.came.append(time.perf_counter())
                seen.output_tokens = max(seen.output_tokens, len(seen.came))
                if len(seen.came) == arrival.leaves_after:
                    seen.outcome = "disconnected"
                    break
    except TimeoutError:
        seen.outcome = "timed out"
    except RequestFailed as error:
        seen.outcome, seen.error = "failed", str(error)
    seen.ended = time.perf_counter()
    return seen


class LatencySpread(msgspec.Struct):
    """How a duration is spread, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class BenchReport(msgspec.Struct):
    """The results of all clients. A spread is null if nothing of its kind was seen.

    Time to first token and inter-token times are those of every client that had them, end to end of those that had
    the whole answer. Tokens count when they reach a client, prompts when their first token does.
    """

    requests: dict[str, int]
    errors: list[str]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: LatencySpread | None
    inter_token_ms: LatencySpread | None
    end_to_end_ms: LatencySpread | None


def summarize_clients(clients: Sequence[ClientRecord]) -> BenchReport:
    """Combine the records of the clients, at least one."""
    duration = max(seen.ended for seen in clients) - min(seen.began for seen in clients)
    requests = {outcome: sum(seen.outcome == outcome for seen in clients) for outcome in OUTCOMES}
    answered = [seen for seen in clients if seen.came]
    prompt_tokens = sum(seen.prompt_tokens for seen in answered)
    output_tokens = sum(seen.output_tokens for seen in clients)
    return BenchReport(
        requests=requests,
        errors=sorted({seen.error for seen in clients if seen.error}),
        duration_s=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=requests["completed"] / duration,
        output_tokens_per_s=output_tokens / duration,
        total_tokens_per_s=(prompt_tokens + output_tokens) / duration,
        ttft_ms=latency_spread([seen.came[0] - seen.began for seen in answered]),
        inter_token_ms=latency_spread(
            [b - a for seen in answered for a, b in zip(seen.came, seen.came[1:], strict=False)]
        ),
        end_to_end_ms=latency_spread([seen.ended - seen.began for seen in clients if seen.outcome == "completed"]),
    )


def latency_spread(seconds: Sequence[float]) -> LatencySpread | None:
    """Return mean and percentiles, these between neighbours in proportion, or None without values."""
    if not seconds:
        return None
    ordered = sorted(1000 * value for value in seconds)

    def percentile(percent: int) -> float:
        place = (len(ordered) - 1) * percent / 100
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        return low + (high - low) * (place - math.floor(place))

    return LatencySpread(sum(ordered) / len(ordered), *map(percentile, PERCENTILES))


def print_bench_report(made: BenchReport, form: str) -> None:
    """Print it, as `table` or `json`."""
    if form == "json":
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")
        return
    console = Console(highlight=False)
    ends = ", ".join(f"{count} {outcome}" for outcome, count in made.requests.items() if count)
    console.print(
        f"{ends} in {made.duration_s:.2f} s; {made.prompt_tokens} prompt and {made.output_tokens} output tokens"
    )
    console.print(
        f"{made.requests_per_s:.2f} requests/s, {made.output_tokens_per_s:.1f} output tokens/s,"
        f" {made.total_tokens_per_s:.1f} tokens/s in all"
    )
    table = Table("ms", *(name for name in LatencySpread.__struct_fields__))
    named = {"first token": made.ttft_ms, "inter-token": made.inter_token_ms, "end to end": made.end_to_end_ms}
    for name, values in named.items():
        table.add_row(name, *(["–"] * 4 if values is None else [f"{v:.2f}" for v in msgspec.structs.astuple(values)]))
    console.print(table)
    for error in made.errors:
        console.print(f"failed: {error}", markup=False)
