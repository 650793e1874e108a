"""Incidents of the lab, lived through in virtual time and served as recordings: what tests and pictures show."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx2

from kvscope.lab.lab_run import frames, inject_fault
from kvscope.lab.scenarios import SCENARIOS
from kvscope.monitor.contract.journal import JournalWriter
from kvscope.monitor.contract.wire import encode
from tests.web.parts import ENGINE, address, service

TOKEN: Final = "a-token-for-this-test"


class Incident(NamedTuple):
    """Where it is looked at, and what the engine itself knows: whom the fault struck."""

    url: str
    code: str
    requests: frozenset[Any]
    blocks: frozenset[Any]

    def ask(self, path: str, **params: Any) -> Any:
        """What the service answers."""
        allowed = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx2.get(f"{self.url}/api/{path}", params=params, headers=allowed, trust_env=False, timeout=30)
        return answer.raise_for_status().json()

    def chosen(self) -> dict[str, str]:
        """By the path of a view that is about one thing, one that is behind the incident."""
        finding = next(one for one in self.ask("findings", engine=ENGINE) if one["code"] == self.code)
        requests = [one for one in self.ask("requests", engine=ENGINE) if one["id"] in self.requests]
        request = max(requests, key=lambda one: (one["blocks"], one["preemptions"]))
        blocks = self.ask("request", engine=ENGINE, id=request["id"])["blocks"]
        block = min(self.blocks, default=min(blocks, default=1))
        return {"finding": finding["id"], "request": request["id"], "block": str(block)}

    def address(self, path: str) -> str:
        """Of any view."""
        chosen = self.chosen() if path in ("finding", "request", "block") else {}
        return self.url + address(path, **({"id": chosen[path]} if path in chosen else {}))


@contextmanager
def served(scenario: str, directory: Path, *arguments: str) -> Iterator[Incident]:
    """That scenario as the page shows it at its end. That a fault is switched on is taken out of what the engine says,
    so that nobody reads the answer there.
    """
    wanted = next(each for each in SCENARIOS if each.name == scenario)
    _, life = inject_fault(wanted, 0, directory / "told")
    with closing(life.engine):  # it lives on till it has been heard out
        reported = list(frames(directory / "told"))
        requests = wanted.requests(life).most if wanted.requests is not None else frozenset()
        blocks = wanted.blocks(life).most if wanted.blocks is not None else frozenset()
    with closing(JournalWriter(directory / "recording", reported[0].epoch)) as kept:
        for batch in reported:
            kept.append(encode(batch), batch.sequence)
    with service("--recording", str(directory / "recording"), *arguments) as url:
        incident = Incident(url, wanted.code, requests, blocks)
        while not all(source["in_step"] for source in incident.ask("sources")):
            time.sleep(0.05)
        yield incident
