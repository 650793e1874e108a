"""A person's report of an incident: commands and numbers in prose, of any language, to facts.

It is read where a file has no line of an engine's statistics. Quoted lines of a log are parsed like those of any log
(monitor/sources/engine_log.py). This module has the rest. Percentages count only on a line that speaks of the cache.

    fact                    from
    ----------------------  -----------------------------------------------------------------------------------
    model, port, …          "vllm serve NAME --port 8000 --max-num-batched-tokens=64K": the flags in SERVE_FLAGS
    load_input_len          "vllm bench serve --input-len 80000": tokens of a request's prompt
    load_output_len         "--output-len 800": tokens that are generated for it
    load_num_prompts        "--num-prompts 60"
    load_concurrencies      "18, 15": of "--max-concurrency 18" and of "the same with a concurrency of 15", in order
    usage_fell_from, _to    "from 100% to 0%": shares of the pool, 0 to 1
    usage_peak_told         "at most 82.1%": the last other share with a fraction
    preemptions_told        "no preemptions": 0
    version                 "vLLM 0.18.0"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

COMMAND: Final = re.compile(
    r"(?P<serve>\bvllm serve\b|\bapi_server\b)|\bvllm bench serve\b|\bbenchmark_serving\b|\bbench_serving\b"
)
FLAG: Final = re.compile(r"--([a-z][a-z0-9-]{1,60})(?:[= ]+(?!-)([^\s'\"]{1,200}))?")
SIZE: Final = re.compile(r"(\d{1,12})([kKmM]?)", re.ASCII)
FRACTION: Final = re.compile(r"\d{1,12}\.\d{1,12}", re.ASCII)
UNITS: Final = {"": 1, "k": 1000, "K": 1 << 10, "m": 1_000_000, "M": 1 << 20}
"""As vLLM reads them in its flags."""
SERVE_FLAGS: Final = (
    "model",
    "served-model-name",
    "host",
    "port",
    "max-num-batched-tokens",
    "max-num-seqs",
    "max-model-len",
    "block-size",
    "gpu-memory-utilization",
    "kv-cache-memory-bytes",
    "num-gpu-blocks-override",
    "tensor-parallel-size",
    "data-parallel-size",
    "kv-transfer-config",
    "enable-prefix-caching",
    "no-enable-prefix-caching",
)
"""Flags that name an engine, or bear on its KV memory."""
LOAD_FLAGS: Final = {
    "load_input_len": ("input-len", "random-input-len", "random-input", "sonnet-input-len"),
    "load_output_len": ("output-len", "random-output-len", "random-output", "sonnet-output-len"),
    "load_num_prompts": ("num-prompts",),
}
CONCURRENCY_FLAG: Final = "max-concurrency"
CONCURRENCY: Final = re.compile(
    r"(?:并发|concurrency|concurrent requests)(?:(?!tokens)[^\d\n-]){0,16}?(\d{1,6})\b(?![.,]\d)"
    r"|\b(\d{1,6})(?: |个)?(?:concurrent|simultaneous|parallel|并发)",
    re.ASCII | re.IGNORECASE,
)
ABOUT_CACHE: Final = re.compile(r"cache|缓存", re.IGNORECASE)
SHARE: Final = r"(\d{1,3}(?:\.\d{1,3})?) ?[%％]"
FALL: Final = re.compile(rf"{SHARE}[^%％\d\n]{{1,40}}?{SHARE}", re.ASCII)
PEAK: Final = re.compile(r"(\d{1,2}\.\d{1,3}) ?[%％]", re.ASCII)
NO_PREEMPTION: Final = re.compile(r"\bno preemption|没有[^\n]{0,10}抢占", re.IGNORECASE)
VERSION: Final = re.compile(r"\bvllm[ =-]{1,3}v?(\d{1,3}\.\d{1,3}\.\d{1,3})\b", re.ASCII | re.IGNORECASE)
LEAST_FALL: Final = 0.5
"""A share of the pool: a smaller fall between two values is no collapse."""


class StatedFact(NamedTuple):
    """A fact, and the line (from 1) that it was read on."""

    line: int
    name: str
    value: int | float | str


def stated_facts(lines: Iterable[str]) -> list[StatedFact]:
    """Return the facts in the lines of a report. A command that is broken by a backslash at the end of a line is
    one.
    """
    facts: list[StatedFact] = []
    concurrencies: dict[int, int] = {}
    for number, line in _joined(lines):
        if (command := COMMAND.search(line)) is not None:
            flags = dict(FLAG.findall(line[command.end() :]))
            if command["serve"]:
                facts += [
                    StatedFact(number, name, value) for name, value in _served_arguments(line[command.end() :], flags)
                ]
            else:
                facts += [StatedFact(number, name, value) for name, value in _load(flags)]
            named = [flags[CONCURRENCY_FLAG]] if CONCURRENCY_FLAG in flags else []
        elif "tokens per request" in line:
            continue  # an engine's own line, of another concurrency
        else:
            named = [first or second for first, second in CONCURRENCY.findall(line)]
        for text in named:
            if isinstance(size := value_of(text), int) and size > 0:
                concurrencies.setdefault(size, number)
        if NO_PREEMPTION.search(line):
            facts.append(StatedFact(number, "preemptions_told", 0))
        if (version := VERSION.search(line)) is not None:
            facts.append(StatedFact(number, "version", version[1]))
        if ABOUT_CACHE.search(line):
            facts += [StatedFact(number, name, value) for name, value in _shares(line)]
    if concurrencies:
        facts.append(StatedFact(min(concurrencies.values()), "load_concurrencies", ", ".join(map(str, concurrencies))))
    return facts


def _joined(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield each line with its number. Lines joined by a backslash are one, with the first's number."""
    whole, first = "", 0
    for number, line in enumerate(lines, 1):
        first = first or number
        bare = line.rstrip()
        if bare.endswith("\\") and len(whole) < 10_000:
            whole += bare[:-1] + " "
            continue
        yield first, whole + bare
        whole, first = "", 0
    if whole:
        yield first, whole


def _served_arguments(rest: str, flags: dict[str, str]) -> Iterator[tuple[str, int | float | str]]:
    """Yield the arguments that an engine was started with, under the names that it logs them by."""
    words = rest.split()
    if words and not words[0].startswith("-"):
        yield "model", words[0]
    for flag in SERVE_FLAGS:
        if flag in flags:
            name = flag.removeprefix("no-").replace("-", "_")
            yield name, value_of(flags[flag]) if flags[flag] else str(name == flag.replace("-", "_"))


def _load(flags: dict[str, str]) -> Iterator[tuple[str, int]]:
    for name, spellings in LOAD_FLAGS.items():
        for spelling in spellings:
            if isinstance(size := value_of(flags.get(spelling, "")), int):
                yield name, size


def _shares(line: str) -> Iterator[tuple[str, float]]:
    for high, low in FALL.findall(line):
        if float(high) - float(low) >= 100 * LEAST_FALL and float(high) <= 100:
            yield "usage_fell_from", round(float(high) / 100, 5)
            yield "usage_fell_to", round(float(low) / 100, 5)
    for peak in PEAK.findall(line):
        yield "usage_peak_told", round(float(peak) / 100, 5)


def value_of(text: str) -> int | float | str:
    """Return a flag's value: of "64K" 65536, of "0.9" 0.9, of a name the name."""
    if (size := SIZE.fullmatch(text)) is not None:
        return int(size[1]) * UNITS[size[2]]
    return float(text) if FRACTION.fullmatch(text) else text
