"""What Prometheus is shown, so that a dashboard has something to draw: the service, a lab with incidents, a vLLM."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvscope.lab.recorded_pages import page, rows, served, whole_page
from tests.dashboards.programs import free_port, service_command

GRACES = tuple(
    part
    for setting in ("leak.finished-held.grace_s", "leak.finished-held.unseen_together_s", "leak.unaccounted.grace_s")
    for part in ("--set", f"{setting}=0.5")
)


def service(events: str, address: str, hook: str) -> list[str]:
    """The command of a service there, which tells of findings there, and to somebody who is not there."""
    alerts = ("--alert", hook, "--alert", f"http://127.0.0.1:{free_port()}/nobody", "--alert-private")
    return service_command(events, int(address.rpartition(":")[2]), *GRACES, *alerts)


def lab(events: str) -> list[str]:
    """The command of an engine with every incident."""
    return [sys.executable, "-m", "tests.dashboards.incident_process", events]


@contextmanager
def vllm_page(first: int = 90, every_s: float = 0.25) -> Iterator[str]:
    """Where a vLLM's page is, as it was while blocks leaked, from its `first` scrape on: another one `every_s`."""
    histograms = [
        line for line in whole_page().splitlines() if re.match(r"vllm:\w+_(seconds|tokens)_(bucket|sum|count)", line)
    ]
    pages = []
    for number, row in enumerate(rows("never-freed", 0.5)[first:], 1):
        grown = (f"{series} {float(value) * number}" for series, _, value in (h.rpartition(" ") for h in histograms))
        pages.append(page(row) + "\n".join(grown) + "\n")
    with served(pages[0]) as server:
        stop = threading.Event()

        def go_on() -> None:
            for text in pages:
                server.answer = text
                if stop.wait(every_s):
                    return
            server.answer = pages[0]  # it is restarted

        thread = threading.Thread(target=go_on)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        stop.set()
        thread.join()


def filled_in(expr: str) -> str:
    """A dashboard's expression, as Grafana asks it of all engines."""
    expr = expr.replace("$__rate_interval", "3s")
    return re.sub(r"\$(engine|model|cluster|namespace|job|instance)\b", ".*", expr)
