"""Detectors that kvscope must refuse, and some that it must survive."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector, Settings
from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class Sound(Detector[Judgement]):
    """All that a detector must declare; the others break one thing each."""

    code = "broken.sound"
    severity = "warning"
    title = "A plug-in of the tests"
    requires = ("stream", "metrics", "log")
    runbook = "# A plug-in of the tests\n"

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Find nothing."""
        return iter(())


class HasOurPrefix(Sound):
    """Its code is in one of kvscope's own families."""

    code = "leak.of-a-plug-in"


class HasNoRunbook(Sound):
    """It brings no runbook."""

    code = "broken.no-runbook"
    runbook = ""


class IsNoDetector:
    """It is no subclass of Detector."""


class Raises(Sound):
    """It raises in every call."""

    code = "broken.raises"

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Raise."""
        raise ZeroDivisionError("this detector divides by zero")


class Hangs(Sound):
    """It never returns."""

    code = "broken.hangs"

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Wait for what never comes."""
        threading.Event().wait()
        return iter(())


class Lies(Sound):
    """It yields a judgement under another code."""

    code = "broken.lies"

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield a leak."""
        yield Judgement("leak.finished-held", ledger.engine, "confirmed", "Nothing of this is so.")
