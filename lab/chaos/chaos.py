"""Faults drawn from a seed, against real engines, a monitor and a receiver, and what must hold after each.

    python -m kvscope.lab.chaos.chaos --faults 100 --seed 1 --results /tmp/chaos.jsonl [--resume]

Each round draws one fault or two, and an engine that leaks meanwhile: from before the fault, from during it, or
until during it. After the round:

    alerts    the receiver has been sent that the leak began and that it ended
    repeats   no message came twice, but one for each process that was killed, under the same id
    history   the monitor answers what the engine's journal holds, event by event, and the blocks of a second fold
    notice    what cannot be seen is reported within 5 s, by the monitor or, of the monitor, by an outside probe

Prints the seed, a line for each fault and a table; exits with 1 if something did not hold. --resume goes on after the
rounds that are in --results.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from .arena import AT_WORK, ENGINES, Arena, Delivered, open_alerts, repeats, under_two_ids, wait_for
from .chaos_faults import ChaosFault, DataDeleted, MonitorKill, possible_faults
from .engines_process import chaos_engine_name
from .history_check import HistoryCheck

LEAK: Final = "leak.finished-held"
NOTICE_S: Final = 5.0
NOTICE_SLACK_S: Final = 0.5
"""The question itself takes time on a busy machine."""
ARRIVES_S: Final = 60.0
SETTLES_S: Final = 60.0
PAIR_SHARE: Final = 0.25
BETWEEN_PAIR_S: Final = 1.5
CLOCK_READ_S: Final = 2.0
"""A process reads where its clock was moved to once a second: what it sent until then is not compared."""
FLAP_WINDOW_S: Final = 600.0
MAX_FIRES: Final = 1
"""Of an engine within FLAP_WINDOW_S, before it leaks again: more would be damped as flapping."""
WHEN: Final = ("begins before", "begins during", "ends during")


class ChaosRound(msgspec.Struct):
    """One round and what came of it."""

    number: int
    faults: list[str]
    details: list[str]
    noticed_s: list[float | None]
    """For each fault: -1 if it was not noticed, None where it hides nothing or an earlier one is still reported."""
    incident: str
    problems: list[str]
    repeated: int
    seconds: float


class ChaosRun:
    """The rounds of one seed in one arena."""

    def __init__(self, arena: Arena, seed: int) -> None:
        self._arena = arena
        self._seed = seed
        self._history = HistoryCheck(arena)
        self._possible, self.skipped = possible_faults(arena)
        self._seen = 0
        """Messages that earlier rounds judged."""

    def round(self, number: int) -> ChaosRound:
        """Run one round."""
        rng = random.Random(f"{self._seed} {number}")
        arena, began_s = self._arena, time.monotonic()
        faults = self._draw(rng)
        leaking, when = self._engine_to_leak(rng), rng.choice(WHEN)
        problems: list[str] = []
        if when != "begins during":
            arena.set_leak(leaking, True)
            if when == "ends during":
                self._require(lambda: self._fires(leaking), "the alert did not arrive before the fault", problems)
            else:
                time.sleep(rng.uniform(0, 2))
        noticed = self._cause(faults, rng, lambda: arena.set_leak(leaking, when != "ends during"), problems)
        if when != "ends during":
            self._require(lambda: self._fires(leaking), f"{LEAK} of engine {leaking} was not sent", problems)
            arena.set_leak(leaking, False)
        self._require(lambda: not self._fires(leaking), f"the end of engine {leaking}'s was not sent", problems)
        self._require(arena.is_settled, f"not settled: {self._unsettled()}", problems, SETTLES_S)
        repeated = self._judge_deliveries(faults, problems)
        self._judge_history(faults, leaking, rng, problems)
        return ChaosRound(
            number,
            [fault.name for fault in faults],
            [fault.detail for fault in faults],
            noticed,
            f"engine {leaking} {when}",
            problems,
            repeated,
            round(time.monotonic() - began_s, 1),
        )

    def _draw(self, rng: random.Random) -> list[ChaosFault]:
        kinds = rng.sample(self._possible, 2 if rng.random() < PAIR_SHARE else 1)
        if set(kinds) == {DataDeleted, MonitorKill}:  # a killed process cannot restore what is deleted
            kinds = kinds[:1]
        return [kind(self._arena, rng) for kind in kinds]

    def _engine_to_leak(self, rng: random.Random) -> int:
        """Draw an engine whose alerts are not about to be damped."""
        while True:
            now_s = time.monotonic()
            recent = [each for each in self._arena.received() if now_s - each.at_s < FLAP_WINDOW_S]
            fires = Counter(each.engine for each in recent if each.state == "firing" and each.code == LEAK)
            free = [number for number in range(ENGINES) if fires[chaos_engine_name(number)] <= MAX_FIRES]
            if free:
                fewest = min(fires[chaos_engine_name(number)] for number in free)
                return rng.choice([number for number in free if fires[chaos_engine_name(number)] == fewest])
            time.sleep(5)

    def _fires(self, number: int) -> bool:
        return bool(open_alerts(self._arena.received(), chaos_engine_name(number), LEAK))

    def _cause(
        self, faults: Sequence[ChaosFault], rng: random.Random, turn: Callable[[], None], problems: list[str]
    ) -> list[float | None]:
        """Begin the faults, turn the leak on or off meanwhile, and end them. Return when each was noticed."""
        noticed: list[float | None] = []
        until_s = time.monotonic()
        for index, fault in enumerate(faults):
            if index:
                time.sleep(BETWEEN_PAIR_S)
            is_reported = fault.notice()
            was_reported = is_reported is not None and is_reported()  # a deletion is reported for a minute
            began_s = time.monotonic()
            fault.begin()
            until_s = max(until_s, began_s + fault.hold_s)
            noticed.append(None if was_reported else self._noticed(fault, faults, began_s, problems))
            if not index:
                time.sleep(rng.uniform(0, 1))
                turn()
        time.sleep(max(0.0, until_s - time.monotonic()))
        for fault in faults:
            fault.end()
        return noticed

    def _noticed(
        self, fault: ChaosFault, faults: Sequence[ChaosFault], began_s: float, problems: list[str]
    ) -> float | None:
        """Wait until a fault is reported. The monitor reports nothing while another fault has it stopped."""
        is_reported = fault.notice()
        monitor_is_down = fault is not faults[0] and faults[0].name.startswith("monitor ")
        if is_reported is None or (monitor_is_down and not fault.name.startswith("monitor ")):
            return None
        if wait_for(is_reported, max(NOTICE_S, fault.hold_s)) < 0:
            problems.append(f"{fault.name} was not reported")
            return -1.0
        seconds = time.monotonic() - (fault.notice_from_s() or began_s)
        if seconds > NOTICE_S + NOTICE_SLACK_S:
            problems.append(f"{fault.name} was reported after {seconds:.1f} s")
        return round(seconds, 2)

    @staticmethod
    def _require(done: Callable[[], object], problem: str, problems: list[str], seconds: float = ARRIVES_S) -> None:
        if wait_for(done, seconds) < 0:
            problems.append(problem)

    def _unsettled(self) -> str:
        try:
            late = [view["engine"] for view in self._arena.ask("/api/engines") if view["status"] not in AT_WORK]
            errors = [each["error"] or each["target"] for each in self._arena.ask("/api/sources") if each["error"]]
        except OSError as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__}"
        return f"{late} {errors}"[:300]

    def _judge_deliveries(self, faults: Sequence[ChaosFault], problems: list[str]) -> int:
        """Count what came twice in this round, and what came under two ids at all."""
        received = self._arena.received()
        new: list[Delivered] = received[self._seen :]
        before = {each.message for each in received[: self._seen]}
        repeated = sum(repeats(new).values()) + len({each.message for each in new} & before)
        self._seen = len(received)
        allowed = sum(fault.kills for fault in faults)
        if repeated > allowed:
            problems.append(f"{repeated} messages came twice, {allowed} may")
        problems += [f"{alert} {state} came under two ids" for alert, state in under_two_ids(new)]
        return repeated

    def _judge_history(
        self, faults: Sequence[ChaosFault], leaking: int, rng: random.Random, problems: list[str]
    ) -> None:
        if any(fault.loses_history for fault in faults):
            time.sleep(CLOCK_READ_S)
            self._history.forgive(ENGINES)
            return
        for number in {leaking, rng.randrange(ENGINES)}:
            lacking: list[str] = []
            if wait_for(lambda number=number, lacking=lacking: not self._missing(number, lacking), 10, 1) < 0:  # type: ignore[misc]
                problems += [f"history: {each}" for each in lacking]

    def _missing(self, number: int, lacking: list[str]) -> list[str]:
        lacking[:] = self._history.missing(number)
        return lacking


def line_of(done: ChaosRound) -> str:
    """Return a round as one line."""
    parts = []
    for fault, detail, noticed in zip(done.faults, done.details, done.noticed_s, strict=True):
        seconds = "" if noticed is None else " not noticed" if noticed < 0 else f" noticed after {noticed:.1f} s"
        parts.append(f"{fault}{f' ({detail})' if detail else ''}{seconds}")
    verdict = "; ".join(done.problems) or "held"
    return f"{done.number:4}  {' + '.join(parts)}; incident of {done.incident}: {verdict} ({done.seconds:.0f} s)"


def table_of_faults(rounds: Sequence[ChaosRound]) -> str:
    """Return what came of each kind of fault."""
    lines = [f"{'fault':<24}{'times':>6}{'noticed, median s':>19}{'longest s':>11}{'repeats':>9}{'problems':>10}"]
    names = sorted({name for each in rounds for name in each.faults})
    for name in names:
        of_it = [each for each in rounds if name in each.faults]
        noticed = [
            seconds
            for each in of_it
            for fault, seconds in zip(each.faults, each.noticed_s, strict=True)
            if fault == name and seconds is not None
        ]
        times = f"{statistics.median(noticed):>19.1f}{max(noticed):>11.1f}" if noticed else f"{'–':>19}{'–':>11}"
        repeated = sum(each.repeated for each in of_it)
        lines.append(f"{name:<24}{len(of_it):>6}{times}{repeated:>9}{sum(bool(each.problems) for each in of_it):>10}")
    return "\n".join(lines)


def run_rounds(
    faults: int, seed: int, results: Path | None = None, resume: bool = False, show: Callable[[str], None] = print
) -> list[ChaosRound]:
    """Run rounds until `faults` were caused; return them all, those that were done before among them."""
    rounds: list[ChaosRound] = []
    if results is not None and resume and results.exists():
        rounds = [msgspec.json.decode(line, type=ChaosRound) for line in results.read_bytes().splitlines()]
    elif results is not None:
        results.unlink(missing_ok=True)
    show(f"seed {seed}; {len(rounds)} rounds done before")
    with tempfile.TemporaryDirectory(prefix="kvscope-chaos-") as folder, Arena(Path(folder)) as arena:
        if wait_for(arena.is_settled, SETTLES_S) < 0:
            raise RuntimeError(f"the arena does not settle: see {folder}")
        run = ChaosRun(arena, seed)
        for skipped in run.skipped:
            show(f"skipped: {skipped}")
        while sum(len(each.faults) for each in rounds) < faults:
            done = run.round(len(rounds))
            rounds.append(done)
            if results is not None:
                with results.open("ab") as file:
                    file.write(msgspec.json.encode(done) + b"\n")
            show(line_of(done))
    return rounds


def main() -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvscope.lab.chaos.chaos")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--resume", action="store_true")
    parsed = parser.parse_args()
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores: {' '.join(sys.argv[1:])}", flush=True)
    show: Callable[[str], None] = lambda line: print(line, flush=True)  # noqa: E731
    rounds = run_rounds(parsed.faults, parsed.seed, parsed.results, parsed.resume, show)
    print(table_of_faults(rounds))
    failed = [each for each in rounds if each.problems]
    count = sum(len(each.faults) for each in rounds)
    print(f"{count} faults in {len(rounds)} rounds, seed {parsed.seed}: {len(failed)} rounds with problems")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
