"""Plug-ins are found by entry point and loaded once, and one that fails is recorded and contained."""

from __future__ import annotations

import sys
import threading
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from kvscope.monitor.base import plugins
from kvscope.monitor.base.plugins import Plugin, PluginFailure, PluginRegistry, PluginTimeout, call_within
from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.registry import PluginDetectors
from kvscope.monitor.questions.pipeline import Pipeline

GROUP = "kvscope.detectors"


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with an installed distribution: one plug-in that loads and one that raises on import."""
    (tmp_path / "acme_good.py").write_text("THING = 'thing'\n")
    (tmp_path / "acme_bad.py").write_text("raise OSError('no such\\n  device')\n")
    info = tmp_path / "acme_things-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-things\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ngood = acme_good:THING\nbad = acme_bad:THING\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("acme_good", "acme_bad"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


@pytest.mark.usefixtures("distribution")
def test_an_installed_plugin_loads_and_one_that_raises_on_import_is_recorded() -> None:
    registry = PluginRegistry()
    (good,) = registry.load(GROUP)
    assert (good.name, good.distribution, good.version, good.target) == ("good", "acme-things", "1.2", "thing")
    bad, listed = registry.loaded()
    assert (bad.name, bad.status, bad.error) == ("bad", "failed", "OSError: no such device")
    assert (listed.name, listed.status, listed.error) == ("good", "loaded", "")
    assert listed.since.endswith("Z")
    (failure,) = registry.failures()
    assert failure.plugin.name == "bad"
    assert failure.disabled


@pytest.mark.usefixtures("distribution")
def test_a_group_is_loaded_once() -> None:
    asked: list[str] = []

    def find(group: str) -> list[EntryPoint]:
        asked.append(group)
        return list(entry_points(group=group))

    registry = PluginRegistry(find)
    assert registry.load(GROUP) == registry.load(GROUP)
    assert asked == [GROUP]
    assert registry.load("kvscope.receivers") == []


@pytest.mark.usefixtures("distribution")
def test_a_failure_is_counted_and_keeps_its_beginning() -> None:
    registry = PluginRegistry()
    (good,) = registry.load(GROUP)
    registry.report_failure(good, ValueError("first"))
    first = next(failure for failure in registry.failures() if failure.plugin == good)
    registry.report_failure(good, "second")
    second = next(failure for failure in registry.failures() if failure.plugin == good)
    assert (first.times, second.times) == (1, 2)
    assert second.error == "second"
    assert second.since_ns == first.since_ns
    assert second.last_ns >= first.last_ns
    assert not second.disabled


def test_a_call_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    with pytest.raises(PluginTimeout, match=r"did not return within 0\.05 s"):
        call_within(0.05, release.wait)
    release.set()


def test_a_call_that_returns_or_raises_does_so_to_its_caller() -> None:
    assert call_within(60, lambda: 812) == 812
    with pytest.raises(ZeroDivisionError):
        call_within(60, lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        call_within(60, lambda: sys.exit(3))


def test_nothing_installed_is_no_failure() -> None:
    registry = PluginRegistry(lambda group: [])
    assert [registry.load(group) for group in plugins.GROUPS] == [[], [], []]
    assert registry.loaded() == []
    assert registry.failures() == []


LIES = """
from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Judgement

class Lies(Detector):
    code, severity, title, requires, runbook = "acme.lies", "warning", "It lies", ("metrics",), "Ask it again."

    def detect(self, ledger, settings):
        yield Judgement(code={code!r}, engine={engine!r}, verdict="likely", explanation="It says so.")
"""
ENGINE = "m@h:1/0"


def pipeline_at(at_ns: int) -> Pipeline:
    """An engine of which one sample is known."""
    watch = Pipeline()
    watch.feed([Sample(ENGINE, "1", at_ns, running=1, waiting=0, usage=0.1, source="metrics")])
    return watch


@pytest.mark.parametrize(
    ("code", "engine", "taken"),
    [("acme.lies", ENGINE, True), ("leak.finished-held", ENGINE, False), ("acme.lies", "m@h:2/0", False)],
)
def test_a_judgement_of_another_code_or_engine_is_refused(
    code: str, engine: str, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_lies.py").write_text(LIES.format(code=code, engine=engine))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "acme_lies", raising=False)
    registry = PluginRegistry(lambda group: [EntryPoint("lies", "acme_lies:Lies", group)])
    ledger = pipeline_at(1_000_000_000_000_000_000).fleet.engines[ENGINE]
    found = PluginDetectors(("leak",), registry).judge(ledger, Settings())
    assert [judged.code for judged in found] == ["acme.lies"] * taken
    assert [failure.error for failure in registry.failures()] == [
        f"ValueError: acme.lies of {ENGINE} yielded {code} of {engine}"
    ] * (not taken)


@pytest.mark.parametrize(("ago_ns", "shown"), [(600_000_000_000 - 1, True), (600_000_000_000, False)])
def test_a_failure_is_told_for_ten_minutes(ago_ns: int, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the finding blind.plugin-failed."""
    now_ns = 1_000_000_000_000_000_000
    failure = PluginFailure(Plugin(GROUP, "good", "acme-things", "1.2"), "OSError", 1, now_ns - ago_ns, 1, False)
    monkeypatch.setattr(plugins, "failures", lambda: [failure])
    watch = pipeline_at(now_ns)
    watch.settle()
    assert [finding.code for finding in watch.findings() if finding.code == "blind.plugin-failed"] == [
        "blind.plugin-failed"
    ] * shown
