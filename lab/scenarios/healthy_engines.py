"""Engines under loads that could pass for incidents."""

from __future__ import annotations

from typing import Final

from ..client_load import Clients
from .scenario import Scenario
from .shapes import (
    AHEAD,
    BUSY,
    CHAT,
    FETCHED,
    FETCHED_FINE,
    FETCHED_POOL,
    GONE,
    HOST,
    LEAVING,
    MEDIUM,
    PRIORITY,
    SMALL,
    STRUCTURED,
    TIGHT,
)
from .sizing_scenarios import CAPTURING

HEALTHY: Final = tuple(
    Scenario(name, engine=engine, load=load, seconds=seconds)
    for name, engine, load, seconds in (
        ("chat", MEDIUM, (BUSY,), 40),
        ("chat, one step ahead", {**MEDIUM, **AHEAD}, (BUSY, LEAVING), 40),
        ("long context", MEDIUM, (CHAT, Clients("c", rate=0.2, until_s=20, prompt=(2000, 3000), output=(50, 300))), 60),
        ("bursts", MEDIUM, tuple(Clients(f"b{n}", times=(3.0 + 10 * n,) * 30) for n in range(3)), 45),
        ("prefixes shared by all", MEDIUM, (Clients(rate=4, prefixes=1, prefix=640, prompt=(5, 60)),), 40),
        ("more prefixes than fit", SMALL, (Clients(rate=3, prefixes=20, prefix=320, prompt=(5, 60)),), 40),
        ("priorities", {**SMALL, **PRIORITY}, (Clients(rate=3, priority=(0, 5)),), 60),
        (
            "pool nearly full",
            {**TIGHT, "max_num_seqs": 4},
            (Clients(at_once=6, prompt=(60, 140), output=(10, 30)),),
            40,
        ),
        ("in step, not collapsing", MEDIUM, (Clients(at_once=8, prompt=(60, 60), output=(60, 60), until_s=30),), 40),
        ("storm of aborts", {**MEDIUM, **AHEAD}, (Clients(rate=8, until_s=15, leave=0.9), BUSY), 40),
        ("impatient clients", SMALL, (Clients(rate=3, patience_s=3.0, output=(20, 200)),), 40),
        ("long idle", SMALL, (Clients(times=(1.0, 2.0, 120.0, 121.0, 240.0)),), 250),
        ("slow clients", MEDIUM, (Clients(rate=2, lingers_s=15.0), Clients("p", at_once=3, pause_s=4.0)), 50),
        ("fetched from the host", FETCHED_POOL, (FETCHED, LEAVING), 40),
        ("fetched, and left", {**FETCHED_FINE, **AHEAD}, (FETCHED, GONE), 40),
        ("kept to be sent, with a lease", {**MEDIUM, **HOST, "kv_lease_seconds": 5}, (BUSY, LEAVING), 40),
        ("structured output", MEDIUM, (CHAT, STRUCTURED), 40),
        ("one large prompt after the other", SMALL, (Clients(at_once=2, prompt=(1200, 1500), output=(5, 20)),), 40),
        ("graphs, and a budget", CAPTURING, (BUSY,), 40),
    )
)
