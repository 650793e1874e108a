"""The outbox: alerts that are open, messages to send and messages sent.

alert_store.py    the database that keeps them
alert_policy.py   which messages a transition or the clock causes
alert_views.py    what others read of it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from kvscope.monitor.alerting.alert_policy import AlertPolicy
from kvscope.monitor.alerting.alert_schema import AlertFigures, AlertsView
from kvscope.monitor.alerting.alert_store import AlertStore
from kvscope.monitor.alerting.alert_views import AlertViews
from kvscope.monitor.alerting.receivers.receiver import Receiver
from kvscope.monitor.findings import Transition
from kvscope.monitor.schema import NotificationsView


class Outbox(AlertStore):
    """The alert store with the policy that fills it. Thread-safe. Raises sqlite3.Error from all of it.

    See AlertStore for `path` and `receivers`, AlertPolicy for `repeat_s` and `look_again_s`.
    """

    def __init__(
        self, path: Path | None, receivers: Sequence[Receiver], repeat_s: float, look_again_s: float, now: float
    ) -> None:
        super().__init__(path, receivers, now)
        self._policy = AlertPolicy(self, repeat_s, look_again_s)
        self._views = AlertViews(self)

    def put(self, transitions: Sequence[Transition], now: float) -> None:
        """See AlertPolicy."""
        self._policy.put(transitions, now)

    def stop_watching(self, engines: Iterable[str], now: float) -> None:
        """See AlertPolicy."""
        self._policy.stop_watching(engines, now)

    def hand_over(self, engines: Iterable[str]) -> None:
        """See AlertPolicy."""
        self._policy.hand_over(engines)

    def tick(self, now: float) -> None:
        """See AlertPolicy."""
        self._policy.tick(now)

    def view(self, now: float) -> AlertsView:
        """Return receivers, open alerts, silences and the latest deliveries."""
        return self._views.alerts(now)

    def about(self, finding: str, now: float) -> NotificationsView:
        """Return the notifications of one finding."""
        return self._views.notifications(finding, now)

    def figures(self, now: float) -> AlertFigures:
        """Return the counts that /metrics shows."""
        return self._views.figures(now)
