"""What to change is named by the flag of the engine at hand, with a value that its own figures ask for."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.description import EngineDescription
from kvscope.monitor.contract.samples import Fact
from kvscope.monitor.detectors import advice
from kvscope.monitor.ledger.engine_ledger import EngineLedger


def ledger(**stated: object) -> EngineLedger:
    made = EngineLedger("tiny@127.0.0.1:8000/0")
    made.description = EngineDescription(**stated)  # type: ignore[arg-type]
    return made


def test_the_flag_of_the_engine_at_hand() -> None:
    flags = {"vllm": "--kv-transfer-config", "kvscope": "--kv-connector"}
    for engine, flag in flags.items():
        assert advice.at_hand(ledger(engine=engine), **flags) == flag
    of_both = advice.at_hand(ledger(), **flags)
    assert all(flag in of_both for flag in flags.values())


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.18.1", "upgrade vLLM 0.18.1 to 0.19"),
        ("0.19.0", "the default of vLLM 0.19.0"),
        ("v0.33.0rc1.dev7+g1234", "was switched off"),
        ("", "since 0.19"),
        ("unknown", "since 0.19"),
    ],
)
def test_what_a_release_has(version: str, says: str) -> None:
    stated = advice.whole_prompts_only(ledger(engine="vllm", version=version))
    assert says in stated
    assert "--scheduler-reserve-full-isl" in stated


def test_a_budget_is_lowered_from_what_it_is() -> None:
    reported = ledger()
    assert advice.smaller_budget(reported) == f"--max-num-batched-tokens (to {advice.DEFAULT_BUDGET}, say)"
    reported.facts["max_num_batched_tokens"] = Fact(reported.engine, "a.log:1", "max_num_batched_tokens", 2048)
    assert advice.smaller_budget(reported) == "--max-num-batched-tokens to 1024 (it is 2048)"
    large = ledger(max_num_batched_tokens=8 * advice.DEFAULT_BUDGET)
    assert f" to {advice.DEFAULT_BUDGET} " in advice.smaller_budget(large)


def test_room_is_asked_for_in_bytes_where_a_block_has_a_size() -> None:
    assert "--kv-cache-memory-bytes 20480," in advice.room_for(ledger(kv_bytes_per_block=2048), 10)
    assert "--gpu-memory-utilization" in advice.room_for(ledger(), 10)
