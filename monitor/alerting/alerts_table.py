"""Alerts for a person at a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvscope.monitor.alerting.alert_schema import AlertsView
from kvscope.monitor.text import escaped

MOST_DELIVERIES = 20


def alerts_table(view: AlertsView, console: Console) -> None:
    """Receivers, open alerts, silences, and the latest deliveries, each with the number or name that commands take."""
    _terminal_table(
        console,
        "RECEIVERS",
        ("name", "host", "pending", "state"),
        [
            (one.name, one.host, str(one.pending), _state_text(one.disabled_at, one.paused_until))
            for one in view.receivers
        ],
    )
    _terminal_table(
        console,
        "OPEN ALERTS",
        ("alert", "severity", "code", "engine", "since"),
        [
            (one.id, one.severity, one.code + (" (flapping)" if one.flapping else ""), one.engine, one.since or "")
            for one in view.open
        ],
    )
    _terminal_table(
        console,
        "SILENCES",
        ("number", "matchers", "until", "comment"),
        [(str(one.number), " ".join(one.matchers), one.until, one.comment) for one in view.silences],
    )
    _terminal_table(
        console,
        "DELIVERIES",
        ("number", "at", "kind", "code", "receiver", "state", "tries", "answer"),
        [
            (
                str(one.number),
                one.created_at[:19],
                one.kind,
                one.code,
                one.receiver,
                one.state,
                str(one.tries),
                one.answer,
            )
            for one in view.deliveries[:MOST_DELIVERIES]
        ],
    )


def _state_text(disabled_at: str | None, paused_until: str | None) -> str:
    if disabled_at:
        return f"disabled since {disabled_at}: it answered 410. `monitor alerts test` enables it if the test succeeds"
    return f"paused until {paused_until}, as it asked" if paused_until else "ready"


def _terminal_table(console: Console, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    console.print(f"{title}  {len(rows) or 'none'}", style="bold")
    if rows:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in columns:
            table.add_column(column, style="", header_style="dim", overflow="fold")
        for row in rows:
            table.add_row(*(escape(escaped(cell)) for cell in row))
        console.print(table)
    console.print()
