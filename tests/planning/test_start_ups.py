"""The plan against what engines of other people printed at their start."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.monitor.planning.kv_pool import pool_of
from kvscope.monitor.planning.model_shape import shape_of
from tests.planning.start_ups import NOT_ENOUGH, START_UPS, StartUp, computed, table

PAGE = Path(__file__).parent.parent.parent / "docs" / "plan.md"


@pytest.mark.parametrize("row", START_UPS, ids=lambda row: row.source)
def test_each_printed_size_is_within_one_percent(row: StartUp) -> None:
    plan = computed(row)
    for name, printed in row.printed.items():
        assert plan[name] == pytest.approx(printed, rel=0.01), name


def test_the_other_model_that_a_report_names_does_not_fit_its_sizes() -> None:
    """vLLM 40691 names Qwen3.5-35B-A3B in its text and 27B in its command: only 27B has blocks of 784 tokens."""
    (row,) = (row for row in START_UPS if row.source == "vLLM 40691")
    assert computed(row)["block_size"] == 784
    other = row.config | {
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "hidden_size": 2048,
    }
    off = computed(row._replace(config=other | {"linear_num_value_heads": 32}))
    assert abs(off["tokens"] - row.printed["tokens"]) > 0.1 * row.printed["tokens"]


def test_two_workers_explain_the_row_that_is_not_checked() -> None:
    """178,880 tokens of Qwen3-235B on 4 ranks take 0.09 GiB less than the memory that one of the workers printed."""
    (row,) = (row for row in START_UPS if row.source == "vLLM 21348, SGLang")
    pool = pool_of(shape_of(row.config, tensor_parallel=4), row.settings)
    assert 178_880 * pool.bytes_per_block / (1 << 30) == pytest.approx(8.02, abs=0.005)
    assert "8.02 GiB" in NOT_ENOUGH["vLLM 21348, vLLM"]


def test_the_page_has_the_table() -> None:
    lines = PAGE.read_text().splitlines()
    missing = [line for line in table() if line not in lines]
    assert missing == []
    assert [source for source in NOT_ENOUGH if not any(line.startswith(f"| {source} |") for line in lines)] == []
