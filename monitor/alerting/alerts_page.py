"""Alerts for a person at a browser: one page of tables and buttons, without a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from urllib.parse import quote

from kvscope.monitor.alerting.alert_schema import AlertsView

_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Alerts – kvscope</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<link rel="icon" type="image/svg+xml" href="/assets/kvscope.svg">
<style>
body { font: 14px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8884; }
form { display: inline; }
</style></head><body>
<p><a href="/">kvscope</a></p><h1>Alerts</h1>
"""
_TAIL = "</body></html>\n"


def alerts_page(view: AlertsView) -> str:
    """Receivers with a test button each, open alerts, silences, and the delivery log with a button to send again."""
    receivers = [
        (
            one.name,
            one.host,
            str(one.pending),
            _html_state(one.disabled_at, one.paused_until),
            _button("Test", f"/api/alerts/test?receiver={quote(one.name)}", one.name),
        )
        for one in view.receivers
    ]
    deliveries = [
        (
            one.created_at,
            one.kind,
            one.code,
            one.engine,
            one.receiver,
            one.state,
            str(one.tries),
            one.answer,
            ""
            if one.state == "pending" or one.kind == "test"
            else _button("Send again", f"/api/alerts/deliveries/{one.number}/replay", f"delivery {one.number}"),
        )
        for one in view.deliveries
    ]
    parts = (
        _HEAD,
        _html_table("Receivers", ("name", "host", "pending", "state", ""), receivers),
        _html_table(
            "Open alerts",
            ("severity", "code", "engine", "since", "what"),
            [(one.severity, one.code, one.engine, one.since or "", one.explanation) for one in view.open],
        ),
        _html_table(
            "Silences",
            ("number", "matchers", "until", "comment"),
            [(str(one.number), " ".join(one.matchers), one.until, one.comment) for one in view.silences],
        ),
        _html_table(
            "Deliveries", ("at", "kind", "code", "engine", "receiver", "state", "tries", "answer", ""), deliveries
        ),
        _TAIL,
    )
    return "".join(parts)


def no_alerts_page(why: str) -> str:
    """The page of a service that sends none."""
    return f"{_HEAD}<p>{escape(why)}</p>{_TAIL}"


class _Html(str):
    """What is HTML already."""


def _button(title: str, action: str, about: str) -> str:
    label = escape(f"{title}: {about}")
    return _Html(
        f'<form method="post" action="{escape(action)}"><button aria-label="{label}">{escape(title)}</button></form>'
    )


def _html_state(disabled_at: str | None, paused_until: str | None) -> str:
    if disabled_at:
        return f"disabled since {disabled_at}: it said that it is gone; a test that it takes enables it"
    return f"paused until {paused_until}, as it asked" if paused_until else "ready"


def _html_table(title: str, columns: Iterable[str], rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
    table = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f"<h2>{escape(title)}</h2>{table if rows else '<p>None.</p>'}\n"


def _cell(cell: str) -> str:
    return cell if isinstance(cell, _Html) else escape(cell)
