"""Six incidents in virtual time, and what a person at a terminal is told of each: tests/terminal/golden/ holds it.

python -m tests.terminal.golden writes the files anew; read what has changed before you keep it.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvscope.lab.lab_run import inject_fault
from kvscope.lab.scenarios import SCENARIOS
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.recording import Recording
from kvscope.monitor.terminal.cli import main
from tests.terminal.screen import shown

GOLDEN: Final = Path(__file__).parent / "golden"
RECORDING: Final = "recording"


class Reported(NamedTuple):
    """A scenario, and the commands of which the output is kept, by name."""

    scenario: str
    commands: dict[str, tuple[str, ...]]


def _commands(explain: str, *windows: str) -> dict[str, tuple[str, ...]]:
    """`windows`: what is compared, of the same recording."""
    return {
        "doctor": ("doctor", RECORDING),
        "explain": ("explain", *explain.split(), RECORDING),
        "diff": ("diff", RECORDING, *(word for window in windows for word in ("--window", window))),
    }


TOLD: Final = {
    "leak.finished-held": Reported(
        "leak.finished-held chat", _commands("request r-0", "..22:13:24", "22:13:24..22:14:42")
    ),
    "stuck.never-fits": Reported("stuck.never-fits chat", _commands("request large-0", "..22:13:25", "22:13:25..")),
    "collapse.lockstep": Reported("collapse.lockstep bare", _commands("drop", "20s..")),
    "thrash.preemption": Reported("thrash.preemption bare", _commands("request r-1", "20s..")),
    "stuck.engine-stalled": Reported(
        "stuck.engine-stalled:after=100:limit=1 chat", _commands("request s-5", "..22:13:26", "22:13:26..")
    ),
    "corrupt.double-free": Reported(
        "corrupt.double-free:limit=1 once", _commands("block 1", "..22:13:24", "22:13:24..22:13:37")
    ),
}


@contextlib.contextmanager
def recorded(code: str) -> Iterator[Path]:
    """The incident's recording, in a directory that is the current one meanwhile: its path is always the same."""
    scenario = next(each for each in SCENARIOS if each.name == TOLD[code].scenario)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        _, life = inject_fault(scenario, 0, Path(RECORDING))
        try:
            yield Path(RECORDING)
        finally:
            life.engine.close()


def printed(*arguments: str) -> str:
    """What `monitor` prints where stdout is no terminal; a line of its own tells the exit code."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(arguments)
    return f"$ monitor {' '.join(arguments)}\n{out.getvalue()}(exit code {code})\n"


def outputs(code: str) -> dict[Path, str]:
    """Each file of one incident, and what it should hold, where it is `recorded`."""
    watch = Pipeline()
    watch.feed(Recording(Path(RECORDING)))
    watch.settle()
    reported = {name: printed(*arguments) for name, arguments in TOLD[code].commands.items()} | {"top": shown(watch)}
    return {GOLDEN / f"{code}.{name}.txt": text for name, text in reported.items()}


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    for each in TOLD:
        with recorded(each):
            for path, text in outputs(each).items():
                path.write_text(text, encoding="utf-8")
