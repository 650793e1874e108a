"""The fleet view of a hub in a browser: fifty engines whose points and findings are on the bus."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import expect

from kvscope.lab.chromium import NO_CHROMIUM, chromium
from kvscope.monitor.fleet.bus_messages import AnnotationMessage, FindingMessage, PointMessage
from kvscope.monitor.fleet.bus_messages import finding_message as message_of
from tests.finding_transitions import AlertMessages
from tests.fleet.nats_servers import bus_config_of, one_server, set_up
from tests.fleet.stored import publish
from tests.fleet.test_bus_messages import points
from tests.test_service import process
from tests.web.parts import Account

ENGINES = 50
LEAKING = range(16, 24)
"""All engines of node-2."""
PRODUCER, CONSUMER = 16, 2


def name_of(number: int) -> str:
    return f"engine-{number}@10.0.0.{number}:8000/0"


def fleet(found: Sequence[FindingMessage]) -> list[PointMessage]:
    (point,) = points()
    open_of = {each.transition.judgement.engine: [each.transition.id] for each in found}
    return [
        msgspec.structs.replace(
            point,
            id=f"{number} {time.time_ns()}",
            agent=f"agent-{number // 8}",
            at_ns=time.time_ns(),
            engine=msgspec.structs.replace(point.engine, engine=name_of(number)),
            open=open_of.get(name_of(number), []),
            zone=f"zone-{number % 2}",
            node=f"node-{number // 8}",
            usage=[number] * 60,
            service="chat" if number in (PRODUCER, CONSUMER) else "",
            kv_role={PRODUCER: "producer", CONSUMER: "consumer"}.get(number, ""),
        )
        for number in range(ENGINES)
    ]


def found(number: int) -> FindingMessage:
    (transition,) = AlertMessages().fire(time.time() - 7_200 * (1 + number % 7), engine=name_of(number))
    return message_of(transition, f"agent-{number // 8}")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason=NO_CHROMIUM)
def test_many_engines_are_found_grouped_and_updated(tmp_path: Path) -> None:
    with one_server(tmp_path / "nats") as server:
        config = bus_config_of([server])
        set_up(config)
        moved = AnnotationMessage(
            id="moved",
            agent="agent-0",
            at_ns=time.time_ns(),
            engine=name_of(3),
            kind="taken-over",
            text="agent-9 took over",
        )
        leaks = [found(number) for number in LEAKING]
        publish(config, [*fleet(leaks), *leaks, moved])
        with process("kvscope.monitor", "hub", "--nats", server.url, "--port", "0") as run, chromium() as browser:
            assert run.stderr is not None
            url = run.stderr.readline().split()[2].rstrip(",")
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            account = Account(page)
            publish(config, fleet(leaks))  # points from before the hub and the browser started may be old by now
            page.goto(url)
            expect(page.locator("#view h1")).to_contain_text(f"8 engines of {ENGINES} with open findings")
            expect(page.locator(".cell")).to_have_count(ENGINES)
            expect(page.locator(".cell.none")).to_have_count(ENGINES - len(LEAKING))
            expect(page.locator("#engines tbody tr")).to_have_count(len(LEAKING))
            expect(page.locator("#causes")).to_contain_text("8 of 8 engines with node node-2 have it, and 0 of 42")
            expect(page.locator("#notes")).to_contain_text("agent-9 took over")
            expect(page.locator("#services tbody tr")).to_have_count(1)
            expect(page.locator("#services")).to_contain_text("chat")
            expect(page.locator("#services")).to_contain_text("Prefill keeps blocks (cannot-tell)")
            expect(page.locator("#services td").nth(0)).to_contain_text(name_of(PRODUCER))
            expect(page.locator("#services td").nth(1)).to_contain_text(name_of(CONSUMER))
            assert page.locator("img.strips").count() == 2
            page.goto(f"{url}/fleet?by=zone&q=node-2")
            expect(page.locator(".cell")).to_have_count(len(LEAKING))
            expect(page.get_by_role("heading", name=re.compile("^zone-[01]"))).to_have_count(2)
            publish(config, [found(40)])
            page.goto(f"{url}/fleet?by=node")
            expect(page.locator("#view h1")).to_contain_text(f"9 engines of {ENGINES}")
            publish(config, [found(41)])  # and while the page is open
            expect(page.locator("#view h1")).to_contain_text(f"10 engines of {ENGINES}")
            page.locator("#engines tbody tr a").first.click()
            expect(page.locator("#view")).to_contain_text("does not answer: it is not connected to NATS")
            # Leaving a page ends what it still loads.
            assert [each for each in account.wrong if not each.startswith("failed: ")] == []
            assert account.elsewhere(url) == []
