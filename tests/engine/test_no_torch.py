"""Blocks and scheduler run where there is no torch: in a lab, beside another engine."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.usefixtures("real_parts")
def test_blocks_and_scheduler_import_no_torch() -> None:
    modules = (
        "kvscope.engine.blocks.table_audit",
        "kvscope.engine.blocks.block_pool",
        "kvscope.engine.blocks.prefix_hashes",
        "kvscope.engine.blocks.kv_cache_manager",
        "kvscope.engine.blocks.block_pool",
        "kvscope.engine.config",
        "kvscope.engine.connectors.base",
        "kvscope.engine.faults",
        "kvscope.engine.scheduling.scheduler_state",
        "kvscope.engine.requests.request",
        "kvscope.engine.requests.request",
        "kvscope.engine.scheduling.scheduler",
        "kvscope.engine.core.watchdog",
    )
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]
