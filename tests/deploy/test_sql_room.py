"""The room that a query of a hub may take fits into what the chart, the sidecar and the unit give an agent."""

from __future__ import annotations

import re

import yaml

from kvscope.monitor.base import limits
from kvscope.monitor.service.settings_table import size
from tests.deploy.charts import CHART, ROOT

AGENT_BYTES = 512 << 20
"""What the chart requests for the agent itself."""
QUERIES_BYTES = limits.SQL_AT_ONCE * (limits.SQL_MEMORY_BYTES + limits.SQL_OVERHEAD_BYTES)
DISK_BYTES = limits.SQL_AT_ONCE * limits.SQL_SPILL_BYTES
UNIT = (ROOT / "deploy" / "systemd" / "kvscope-agent.service").read_text()
SIDECAR = (ROOT / "deploy" / "kustomize" / "sidecar" / "pod.yaml").read_text()
AGENT = (CHART / "templates" / "_agent.tpl").read_text()


def test_memory_of_an_agent_holds_its_queries() -> None:
    agent = yaml.safe_load((CHART / "values.yaml").read_text())["agent"]["resources"]
    assert size(agent["requests"]["memory"].rstrip("i")) == AGENT_BYTES
    sidecar = re.search(r"limits: \{memory: (\w+)i\}", SIDECAR)
    unit = re.search(r"^MemoryMax=(\w+)$", UNIT, re.MULTILINE)
    assert sidecar is not None
    assert unit is not None
    for allowed in (agent["limits"]["memory"].rstrip("i"), sidecar[1], unit[1]):
        assert size(allowed) >= AGENT_BYTES + QUERIES_BYTES


def test_scratch_of_an_agent_is_bounded_and_holds_what_queries_spill() -> None:
    for text in (SIDECAR, AGENT):
        scratch = re.search(r"name: kvscope-scratch\n\s+emptyDir: \{sizeLimit: (\w+)i\}", text)
        assert scratch is not None
        assert size(scratch[1]) >= 2 * DISK_BYTES  # open segments are closed there too


def test_the_unit_allows_the_process_of_a_query_to_confine_itself() -> None:
    assert "TMPDIR=/var/tmp" in UNIT
    for call in ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"):
        assert re.search(rf"^SystemCallFilter=.*\b{call}\b", UNIT, re.MULTILINE)
