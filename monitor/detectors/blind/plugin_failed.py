"""blind.plugin-failed: a plug-in was refused, raised or did not return."""

from __future__ import annotations

from collections.abc import Iterator

from ...base import plugins
from ...base.plugins import PluginFailure
from ...base.text import clock_time, counted
from ...ledger.engine_ledger import EngineLedger
from ..detector import SIGNALS, Detector, Settings, Threshold
from ..judgement import Evidence, Judgement

OBSERVER = "kvscope"
_WHAT_IS_MISSING = {
    plugins.DETECTOR_GROUP: "what it detects",
    plugins.SOURCE_GROUP: "what it reads",
    plugins.RECEIVER_GROUP: "the alerts that it delivers",
}


class PluginFailed(Detector[Judgement]):
    """Plug-ins of other distributions that failed in this process.

    Sees: a plug-in that was refused, raised, or did not return in time. Every engine that this process observes has it.
    Confirmed when: always, since the failure is kvscope's own record.
    Not when: it has worked again for minutes.
    """

    code = "blind.plugin-failed"
    severity = "info"
    title = "A plug-in failed, and its additions are missing"
    outlasts_epoch = True
    requires = SIGNALS

    remember_s = Threshold(600, "s", "a plug-in that has worked again for this long has recovered")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield a judgement for each plug-in that failed recently, or for good."""
        for failure in plugins.failures():
            if failure.disabled or ledger.now_ns - failure.last_ns < settings(self.remember_s) * 1e9:
                yield self._judge_failure(ledger, failure)

    def _judge_failure(self, ledger: EngineLedger, failure: PluginFailure) -> Judgement:
        plugin = failure.plugin
        origin = f"{plugin.distribution} {plugin.version}".strip() or "an unknown distribution"
        afterwards = "kvscope does not call it again." if failure.disabled else "kvscope goes on calling it."
        return self.finding(
            ledger,
            key=f"{plugin.group}:{plugin.name}",
            since_ns=failure.since_ns,
            evidence=(
                Evidence("plugin", plugin.name, "", OBSERVER),
                Evidence("plugin_group", plugin.group, "", OBSERVER),
                Evidence("plugin_distribution", origin, "", OBSERVER),
                Evidence("plugin_error", failure.error, "", OBSERVER),
                Evidence("plugin_failures", failure.times, "times", OBSERVER),
            ),
            explanation=(
                f"The plug-in {plugin.name} ({origin}, group {plugin.group}) failed {counted(failure.times, 'time')}"
                f" since {clock_time(failure.since_ns)}: {failure.error}. {afterwards} Until it works,"
                f" {_WHAT_IS_MISSING.get(plugin.group, 'what it adds')} is missing here. Nothing else is affected."
            ),
            numbers={"the distribution": origin},
        )
