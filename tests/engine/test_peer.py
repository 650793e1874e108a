"""One engine computes the prompt, another goes on from its KV: the same tokens, and no block stays behind anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e .[engine]")

from kvscope.engine.config import EngineConfig
from kvscope.engine.connectors.peer import PeerConnector
from kvscope.engine.core.engine_core import EngineCore
from kvscope.engine.core.intake import Refused
from kvscope.engine.models import load_model
from kvscope.engine.requests.request import KVTransferParams, Output, SamplingParams
from kvscope.monitor.contract.kinds import Status
from tests.engine import checkpoints
from tests.engine.process import EngineProcess, wait_for

BLOCK = 16
MAX_TOKENS = 12
COUNT = 8


def ask(url: str, prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}
    response = httpx2.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


FAMILIES = ["llama", "gpt2", "mistral-full", "qwen2", "qwen3"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_in_one_process_and_decode_in_another(family: str, tmp_path: Path) -> None:
    """Every token as transformers has it, with most of each prompt never computed by the one that decodes."""
    model = checkpoints.save(family, tmp_path)
    prompts = checkpoints.prompts(COUNT, 200, seed=11, shared=0)
    expected = [checkpoints.generate(model, prompt, MAX_TOKENS) for prompt in prompts]
    arguments = [
        "--model",
        str(tmp_path),
        "--kv-connector",
        "peer",
        "--block-size",
        str(BLOCK),
        "--no-enable-prefix-caching",
    ]
    with ExitStack() as stack:
        prefill = stack.enter_context(EngineProcess(*arguments, engine_id="prefill"))
        decode = stack.enter_context(EngineProcess(*arguments, "--async-scheduling", engine_id="decode"))
        made = []
        for prompt in prompts:
            first = ask(prefill.url, prompt, 1, kv_transfer_params={"do_remote_decode": True})
            offer = first.get("kv_transfer_params")
            assert (offer is None) == (len(prompt) < BLOCK)
            fields = {"logprobs": 0, **({"kv_transfer_params": offer} if offer else {})}
            made.append(ask(decode.url, prompt, MAX_TOKENS, **fields)["choices"][0])
        assert [choice["text"] for choice in made] == [text_of(load_tokens(tmp_path), tokens) for tokens in expected]
        brought = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)
        assert brought > sum(map(len, prompts)) / 2
        ledger_state = decode.ledger(
            lambda ledger: ledger.state.totals.finished.get(Status.FINISHED_LENGTH_CAPPED) == COUNT
        )
        assert ledger_state.state.totals.hit_tokens == 0 or ledger_state.state.totals.hit_tokens == brought
        for engine in (prefill, decode):
            free = engine.ledger(lambda ledger: ledger.state.used == 0 and not ledger.state.deferrals)
            assert not free.anomalies


def load_tokens(directory: Path) -> Any:
    return load_model(EngineConfig(model=str(directory))).tokenizer


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    text: str = tokenizer.decode(tokens)
    return text


# -------------------------------------------------------------------- two engines in this process, step by step


class Pair:
    """An engine that prefills and one that decodes, over the tiny model."""

    def __init__(self, stack: ExitStack, **settings: Any) -> None:
        settings = {"block_size": BLOCK, "num_gpu_blocks_override": 60, **settings}
        config = EngineConfig(kv_connector="peer", **settings)
        self.prefill, self.decode = (EngineCore(config, load_model(config)) for _ in range(2))
        for core in (self.prefill, self.decode):
            stack.callback(core.close)
        self.prompt = [token % 256 for token in range(7, 107)]

    def offer(self) -> KVTransferParams:
        """What the first answers, once it has computed the prompt."""
        asked = KVTransferParams(do_remote_decode=True)
        number = self.prefill.submit("p", self.prompt, greedy(1), kv_transfer=asked)
        (last,) = [o for o in finish(self.prefill) if o.number == number and o.status is not None]
        assert last.kv_offer is not None
        return last.kv_offer

    def alone(self) -> list[int]:
        """What the second says to the prompt without any transfer."""
        self.decode.submit("alone", self.prompt, greedy())
        tokens = [token for output in finish(self.decode) for token in output.token_ids]
        self.decode.pool.reset_prefix_cache()
        return tokens

    def continued(self, offer: KVTransferParams) -> list[int]:
        self.decode.submit("d", self.prompt, greedy(), kv_transfer=offer)
        return [token for output in finish(self.decode) for token in output.token_ids]


def greedy(max_tokens: int = MAX_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def finish(core: EngineCore) -> list[Output]:
    outputs: list[Output] = []
    wait_for(lambda: bool(outputs.extend(core.step()) or not core.in_flight))
    return outputs


def settled(core: EngineCore) -> bool:
    core.step()
    return core.pool.num_free == core.pool.usable and not core.scheduler.deferred


@contextmanager
def pair(**settings: Any) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, **settings)


@contextmanager
def computed(core: EngineCore) -> Iterator[list[int]]:
    """How many tokens each step computes while this lasts."""
    tokens: list[int] = []
    complete = core.scheduler.complete

    def watched(plan: Any, *rest: Any) -> Any:
        tokens.append(sum(share.num_tokens for share in plan.shares))
        return complete(plan, *rest)

    core.scheduler.complete = watched  # type: ignore[method-assign]
    yield tokens
    core.scheduler.complete = complete  # type: ignore[method-assign]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_only_what_did_not_come_is_computed(async_scheduling: bool) -> None:
    with pair(async_scheduling=async_scheduling) as two:
        expected = two.alone()
        with computed(two.decode) as tokens:
            assert two.continued(two.offer()) == expected
        assert tokens[0] == len(two.prompt) - (len(two.prompt) - 1) // BLOCK * BLOCK
        wait_for(lambda: settled(two.prefill) and settled(two.decode))


def test_what_the_second_has_itself_is_not_fetched_and_the_first_need_not_keep_it() -> None:
    with pair(kv_lease_seconds=0) as two:
        expected = two.alone()
        offer = two.offer()
        two.decode.submit("warm", two.prompt, greedy(1))
        finish(two.decode)
        loads: list[Any] = []
        assert two.decode.connector is not None
        two.decode.connector.start_load = loads.append  # type: ignore[method-assign]
        assert two.continued(offer) == expected
        assert loads == []
        wait_for(lambda: settled(two.prefill))


def test_a_first_that_forgot_it_refuses_and_the_prompt_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    with pair(kv_lease_seconds=0.05) as two:
        expected = two.alone()
        offer = two.offer()
        wait_for(lambda: settled(two.prefill))
        assert two.prefill.scheduler.deferred == {}
        assert two.continued(offer) == expected
        wait_for(lambda: settled(two.decode))
    assert "its lease has ended" in caplog.text


def test_an_engine_of_another_block_size_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    with pair() as one, pair(block_size=BLOCK // 2) as other:
        expected = other.alone()
        assert other.continued(one.offer()) == expected
    assert "both engines need the same model, dtype and block size" in caplog.text


def test_a_client_that_leaves_during_the_fetch_leaves_nothing_behind() -> None:
    with pair() as two:
        offer = two.offer()
        number = two.decode.submit("d", two.prompt, greedy(), kv_transfer=offer)
        scheduler = two.decode.scheduler
        two.decode.step()
        assert number in scheduler.parked
        two.decode.client_gone(number)
        two.decode.step()
        wait_for(lambda: settled(two.decode) and settled(two.prefill))
        assert number not in scheduler.requests


def test_a_first_that_is_gone_fails_the_fetch_and_the_answer_is_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """The fetch is given up, said to have failed, and what it was for is computed."""
    with pair() as two:
        expected, offer = two.alone(), two.offer()
        connector = two.decode.connector
        assert isinstance(connector, PeerConnector)
        connector.timeout_s = 0.2
        gone = msgspec.structs.replace(offer, remote_endpoint="ipc:///nobody-is-here")
        assert two.continued(gone) == expected
        wait_for(lambda: settled(two.decode))
    assert "nothing came within" in caplog.text


@pytest.mark.parametrize(("side", "step"), [("prefill", "_gather"), ("decode", "_scatter")])
def test_memory_that_runs_out_fails_the_fetch_and_not_the_connector(
    side: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair() as two:
        expected = two.alone()
        connector = getattr(two, side).connector
        with monkeypatch.context() as broken:
            broken.setattr(connector, step, no_memory)
            assert two.continued(two.offer()) == expected
        two.decode.pool.reset_prefix_cache()
        with computed(two.decode) as tokens:
            assert two.continued(two.offer()) == expected
        assert tokens[0] < BLOCK + 1


def no_memory(*_: object) -> None:
    raise RuntimeError("no memory")


def test_a_lease_that_ends_frees_what_nobody_fetched() -> None:
    with pair(kv_lease_seconds=0.05) as two:
        two.offer()
        assert len(two.prefill.scheduler.deferred) == 1
        wait_for(lambda: settled(two.prefill))


@pytest.mark.parametrize(
    ("params", "stated"),
    [
        (KVTransferParams(), "one of do_remote_decode and do_remote_prefill"),
        (KVTransferParams(do_remote_decode=True, do_remote_prefill=True), "one of do_remote_decode"),
        (KVTransferParams(do_remote_prefill=True), "what the other engine answered with"),
        (
            KVTransferParams(
                do_remote_prefill=True, remote_endpoint="tcp://192.0.2.1:5", remote_request_id="a", remote_num_blocks=1
            ),
            "must be on this machine",
        ),
    ],
)
def test_what_makes_no_transfer_is_refused(params: KVTransferParams, stated: str) -> None:
    with pytest.raises(ValueError, match=stated):
        params.check()


def test_an_engine_without_the_connector_refuses() -> None:
    config = EngineConfig(num_gpu_blocks_override=10)
    core = EngineCore(config, load_model(config))
    try:
        with pytest.raises(Refused, match="--kv-connector peer"):
            core.submit("r", [1], greedy(), kv_transfer=KVTransferParams(do_remote_decode=True))
    finally:
        core.close()


def test_the_kv_goes_over_this_machine_only() -> None:
    with pytest.raises(ValueError, match="must be on this machine"):
        EngineConfig(kv_transfer_endpoint="tcp://0.0.0.0:5")
