"""Blocks and scheduler run where there is no torch: in a lab, beside another engine."""

from __future__ import annotations

import subprocess
import sys


def test_blocks_and_scheduler_import_no_torch() -> None:
    modules = (
        "engine.blocks.audit", "engine.blocks.free_queue", "engine.blocks.hashing", "engine.blocks.manager",
        "engine.blocks.pool", "engine.config", "engine.connectors.base", "engine.faults", "engine.queues",
        "engine.request", "engine.sampling", "engine.scheduler", "engine.watchdog",
    )  # fmt: skip
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]
