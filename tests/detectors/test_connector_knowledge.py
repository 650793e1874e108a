"""What the lines of a log show of a KV connector, which may keep blocks of finished requests on purpose."""

from __future__ import annotations

import pytest

from kvscope.lab.paper_engine import BEGAN, Moment, log_lines
from kvscope.monitor.detectors.leak.usage_series import connector_knowledge
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.engine_log import Log
from tests.detectors.scenes import value

ARGUMENTS = "INFO 11-20 11:59:00 [utils.py:1] non-default args: {{'model': 'm', {}}}"
IDLE = [Moment(1.0, 2, 0, 0, 0.3, 5000.0, 50.0, 50, 3), Moment(11.0, 0, 0, 0, 0.3, 5000.0, 51.0, 51, 5)]


def read(*head: str) -> Pipeline:
    """A log of an engine that ends idle with blocks in use, these lines above it."""
    later = "INFO 11-20 12:05:00 [launcher.py:1] GET /health"
    watch = Pipeline()
    watch.feed(Log("paper.log", BEGAN.replace(day=BEGAN.day + 1)).records([*head, *log_lines(IDLE), later]))
    watch.settle()
    return watch


@pytest.mark.parametrize(
    ("head", "known"),
    [
        ([], "unknown"),
        ([ARGUMENTS.format("'max_model_len': 4096")], "none"),
        (
            [ARGUMENTS.format("'kv_transfer_config': KVTransferConfig(kv_connector='X', kv_role='kv_both')")],
            "configured",
        ),
        (
            [ARGUMENTS.format("'kv_transfer_config': KVTransferConfig(kv_connector='X', kv_role='kv_producer')")],
            "producer",
        ),
        (["python -m sglang.launch_server --disaggregation-mode decode"], "consumer"),
        (["INFO 11-20 11:59:10 [factory.py:64] Creating v1 connector with name: NixlConnector"], "configured"),
        (['kv_connector:  "NixlConnector"', 'kv_role:       "kv_both"'], "configured"),  # columns of a configuration
    ],
)
def test_a_connector_is_known_from_arguments_commands_and_configurations(head: list[str], known: str) -> None:
    watch = read(*head)
    (ledger,) = watch.fleet.engines.values()
    assert connector_knowledge(ledger) == known
    (finding,) = [each for each in watch.findings() if each.code == "leak.finished-held"]
    assert value(finding, "connector") == known
