"""An engine of which only the words are there, each frame fed to a Pipeline as it is sent.

It needs no engine: what the real pool never does can be said, and earlier commits can run it.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvscope.engine.bench.clock import VirtualClock
from kvscope.monitor.contract.description import EngineDescription
from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.wire import Batch, decode, encode
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.findings import FindingReport, severity_at_least
from kvscope.monitor.detectors.registry import parse_settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.probes.packer import Packer, Vitals
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.recording import Recording

ENGINE = "lab@127.0.0.1:0/0"
NOTHING_SAID = ("has not spoken", "not heard", 0, -1)
"""Evidence that there is no event of."""


INSTANT_COPIES = {"leak.finished-held.unseen_times": 0.0}
"""A lab's connector copies at once. Tests of the default set it themselves."""


def with_instant_copies(settings: Iterable[str] | Settings) -> Settings:
    """The settings of `--set` beside those of the lab."""
    if isinstance(settings, Settings):
        return settings
    texts = list(settings)
    parse_settings(texts)  # refuses what there is not
    return Settings(INSTANT_COPIES | {name: float(value) for name, _, value in (text.partition("=") for text in texts)})


class Observer:
    """A Pipeline and what a test asks of it."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.watch = Pipeline(settings or Settings(INSTANT_COPIES))

    @property
    def ledger(self) -> EngineLedger:
        return self.watch.fleet.engines[ENGINE]

    def firing(self, code: str = "") -> list[FindingReport]:
        return [f for f in self.watch.findings("firing") if code in ("", f.code)]

    def only(self, code: str) -> FindingReport:
        """The one finding of that code that fires; nothing else of warning or above may."""
        graver = [f for f in self.firing() if f.code == code or severity_at_least(f.severity, "warning")]
        assert [f.code for f in graver] == [code]
        self.is_borne_out(graver[0])
        return graver[0]

    def is_borne_out(self, finding: FindingReport) -> None:
        """What was read of the stream has the position of an event of it, where nothing was lost."""
        ledger = self.watch.fleet.engines.get(finding.engine)
        if ledger is None or not ledger.recent or ledger.losses:
            return
        counts = {(batch.epoch, batch.sequence): len(batch.runs) // 20 for batch in ledger.recent}
        for item in finding.evidence:
            if item.source in ("stream", "audit") and item.value not in NOTHING_SAID:
                epoch, sequence, event = map(int, item.position.split("/"))
                came_before_us = sequence < ledger.recent[0].sequence
                assert came_before_us or event < max(counts[epoch, sequence], 1), item

    def alarms(self) -> list[str]:
        """Codes of warning or above that ever fired, or are about to."""
        found = self.watch.findings() + self.watch.findings("pending")
        return [f.code for f in found if severity_at_least(f.severity, "warning")]


def value(finding: FindingReport, name: str) -> float | int | str:
    """The evidence of that name."""
    return next(e.value for e in finding.evidence if e.name == name)


def recorded(name: str, folder: Path) -> Observer:
    """What is found in a recording of a real engine, of tests/data, with the settings that ship."""
    with tarfile.open(Path(__file__).parent.parent / "data" / f"{name}.rec.tar.gz") as packed:
        packed.extractall(folder, filter="data")
    observer = Observer(Settings())
    observer.watch.feed(Recording(folder / "rec"))
    observer.watch.settle()
    return observer


class Spoken(Observer):
    """An engine's words, one by one: `log` takes them, `say` sends them. Blocks of 4 tokens, one reserved.

    `described`: what its description says besides.
    """

    def __init__(
        self, total: int = 33, settings: Iterable[str] | Settings = (), *, block_size: int = 4, **described: Any
    ) -> None:
        super().__init__(with_instant_copies(settings))
        self.total = total
        self.clock = VirtualClock()
        self.log = EventLog(self.clock)
        self.packer = Packer(self.log, ENGINE, lambda: Vitals(-1, 0, 0, 0, 0, 0, 0))
        description = EngineDescription(engine="other", kv_connector="NixlConnector", **described)
        self.log.started(total, 1, block_size, description.to_json())
        self.say()

    def arrive(self, number: int, blocks: list[int]) -> None:
        """Request `r-NUMBER` arrives, is admitted and has these blocks."""
        tokens = 4 * len(blocks)
        self.log.arrived(number, f"r-{number}", tokens, 8, 0, len(blocks), len(blocks) + 2)
        self.log.allocated(number, blocks)
        self.log.admitted(number, 0)

    def say(self, counts: tuple[int, int, int, int] = (-1, -1, -1, -1)) -> None:
        """Send what was logged, with the pool's own counts (free, cached-idle, used, total) if it says any."""
        self.log.tick()
        self.log.flush(-1, -1, counts)
        for batch in self.packer.pack():
            frame = decode(encode(batch))
            assert isinstance(frame, Batch)
            self.watch.feed([frame])
        self.watch.settle()

    def wait(self, seconds: float) -> None:
        """That much later."""
        self.clock.sleep(seconds)
        self.say()
