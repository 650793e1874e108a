"""Asks every hostile statement of a history, as an agent asks for a hub, in a process whose memory is its own.

    python -m tests.history.hostile_asking DATA

Prints as JSON what went wrong, by how many bytes the process grew at most, and whether it left a process.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Final

import psutil

from kvscope.monitor.base.errors import KvscopeError
from kvscope.monitor.service.sql_question import SqlQuestion
from tests.history.hostile_sql import HOSTILE, READS, aimed, fingerprint
from tests.waiting import PATIENCE_S

DEADLINE_S: Final = 5.0
ANSWER_BYTES: Final = 32 << 20


def main() -> None:
    """Ask them."""
    data = Path(sys.argv[1])
    asked = SqlQuestion(data / "history")
    asked.answer({"query": READS[0]}, PATIENCE_S)  # loads what any question needs
    before = fingerprint(data)
    wrong: list[str] = []
    outcomes: Counter[str] = Counter()
    slowest_s = 0.0
    Path("/proc/self/clear_refs").write_text("5")
    resident = psutil.Process().memory_info().rss
    for statement in HOSTILE:
        began_s = time.monotonic()
        try:
            answer = asked.answer({"query": aimed(statement, data)}, DEADLINE_S)
            outcome = "answered"
            if len(answer) > ANSWER_BYTES:
                wrong.append(f"{len(answer)} bytes: {statement[:100]}")
            if b"a secret" in answer or b"root:" in answer:
                wrong.append(f"another file: {statement[:100]}")
            del answer
        except KvscopeError as error:
            outcome = " ".join(str(error).split()[:4])
        outcomes[outcome] += 1
        took_s = time.monotonic() - began_s
        slowest_s = max(slowest_s, took_s)
        if took_s > PATIENCE_S:  # some of them would run for hours
            wrong.append(f"{took_s:.1f} s: {statement[:100]}")
        if fingerprint(data) != before:
            wrong.append(f"written: {statement[:100]}")
            before = fingerprint(data)
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    left = len(psutil.Process().children())
    found = {"wrong": wrong, "grown": peak - resident, "left": left, "slowest_s": slowest_s, "outcomes": outcomes}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
