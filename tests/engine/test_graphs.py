"""Decodes through inputs that stay where they are, padded to a captured size, say what they say without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e .[engine]")

import torch
from torch import Tensor

from kvscope.engine.blocks.block_pool import NULL_BLOCK
from kvscope.engine.config import TINY, EngineConfig
from kvscope.engine.core.engine_core import EngineCore
from kvscope.engine.execution.attention import BatchAttention, PagedKV
from kvscope.engine.execution.cuda_graphs import MOST_CAPTURED, DecodeGraphs, sizes_up_to, static_inputs
from kvscope.engine.execution.input_batch import InputBatch
from kvscope.engine.execution.model_runner import ModelRunner
from kvscope.engine.models import LoadedModel, load_model, tiny
from kvscope.engine.models.llama import Llama
from kvscope.engine.requests.request import Request, Sampled, SamplingParams
from tests.engine import checkpoints
from tests.engine.steps import execute, plan

MOST = 13
"""Requests at once: no size that is captured but for being the largest."""
LOADED = load_model(EngineConfig())


def test_sizes_are_those_that_vllm_pads_to_and_the_largest() -> None:
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(3) == [1, 2, 3]
    assert sizes_up_to(MOST) == [1, 2, 4, 8, MOST]
    assert sizes_up_to(64) == [1, 2, 4, *range(8, 65, 8)]
    assert sizes_up_to(10 * MOST_CAPTURED)[-1] == MOST_CAPTURED


@contextmanager
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many requests each replay has had."""
    seen: list[int] = []
    replay = DecodeGraphs.replay

    def counting(self: DecodeGraphs, batch: InputBatch) -> Tensor:
        seen.append(len(batch.token_ids))
        return replay(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(DecodeGraphs, "replay", counting)
        yield seen


def params(index: int) -> SamplingParams:
    """Greedy, drawn, penalised and with logprobs by turns, and each ends at another step."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": index},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2},
    ]
    return SamplingParams(max_tokens=4 + 3 * index, ignore_eos=True, **kinds[index % len(kinds)])


def stated(loaded: LoadedModel, settings: dict[str, Any], enforce_eager: bool) -> list[list[Sampled]]:
    """What each of MOST requests gets, of prompts from 1 to 85 tokens."""
    config = EngineConfig(max_num_seqs=MOST, enforce_eager=enforce_eager, **settings)
    core = EngineCore(config, loaded)
    try:
        generator = torch.Generator().manual_seed(5)
        prompts = [torch.randint(256, (1 + 7 * n,), generator=generator).tolist() for n in range(MOST)]
        numbers = [core.submit("", prompt, params(index)) for index, prompt in enumerate(prompts)]
        got: dict[int, list[Sampled]] = {number: [] for number in numbers}
        while core.in_flight:
            for output in core.step():
                assert not output.error
                got[output.number] += output.sampled
        if "num_gpu_blocks_override" in settings:
            assert core.scheduler.num_preemptions > 0
        return list(got.values())
    finally:
        core.close()


SETTINGS: list[dict[str, Any]] = [
    {},
    {"async_scheduling": True},
    {"async_scheduling": True, "num_gpu_blocks_override": 30, "max_num_batched_tokens": 64},
]


def assert_same(eager: list[list[Sampled]], graphs: list[list[Sampled]]) -> None:
    """The same tokens; a probability may differ in its last bits, as with any other size of a batch."""
    for expected, got in zip(eager, graphs, strict=True):
        assert [one.token_id for one in got] == [one.token_id for one in expected]
        for one, other in zip(expected, got, strict=True):
            for left, right in zip(one.logprobs or [], other.logprobs or [], strict=True):
                assert right.token_id == left.token_id
                assert right.logprob == pytest.approx(left.logprob, abs=1e-4)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "plain")
def test_tokens_are_the_same_at_every_batch_size(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    eager = stated(LOADED, settings, enforce_eager=True)
    with replayed(monkeypatch) as sizes:
        assert_same(eager, stated(LOADED, settings, enforce_eager=False))
    # As requests end the batch shrinks, through sizes that are captured and those between.
    assert set(sizes) >= set(range(1, 5)) | ({MOST} if "num_gpu_blocks_override" not in settings else set())


@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen2-window"])
def test_tokens_are_the_same_with_windows_and_without_rotary(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(family, tmp_path)
    loaded = load_model(EngineConfig(model=str(tmp_path)))
    settings: dict[str, Any] = {"model": str(tmp_path), "block_size": 8}
    eager = stated(loaded, settings, enforce_eager=True)
    with replayed(monkeypatch) as sizes:
        assert_same(eager, stated(loaded, settings, enforce_eager=False))
    assert MOST in sizes


def request(number: int, computed: int) -> Request:
    made = Request(number, f"r-{number}", [(7 * number + at) % 256 for at in range(computed + 1)], SamplingParams())
    made.num_computed_tokens = computed
    return made


def test_padding_writes_to_the_reserved_block_only() -> None:
    run = ModelRunner(LOADED, 40, 4, "cpu", "float32")
    run.capture(sizes_up_to(8))
    tables = {number: [1 + 3 * number, 2 + 3 * number, 3 + 3 * number] for number in range(8)}
    # A full batch first, so that what it leaves in the inputs is there for the smaller one.
    execute(run, plan(*((request(number, 9), 1) for number in range(8))), tables)
    before = run.gather(range(40))
    execute(run, plan(*((request(number, 5), 1) for number in range(5))), tables)
    after = run.gather(range(40))
    changed = {block for block in range(40) if not torch.equal(before[:, :, block], after[:, :, block])}
    assert changed - {NULL_BLOCK} == {tables[number][1] for number in range(5)}


def test_what_is_not_all_decodes_or_too_much_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ModelRunner(LOADED, 40, 4, "cpu", "float32")
    run.capture(sizes_up_to(4))
    tables = {number: [1 + 3 * number, 2 + 3 * number, 3 + 3 * number] for number in range(8)}
    with replayed(monkeypatch) as sizes:
        execute(run, plan((request(0, 9), 1), (Request(1, "r-1", [1, 2, 3], SamplingParams()), 3)), tables)
        execute(run, plan(*((request(number, 9), 1) for number in range(5))), tables)
        assert sizes == []
        execute(run, plan(*((request(number, 9), 1) for number in range(4))), tables)
        assert sizes == [4]


def test_the_cpu_is_eager_unless_told_and_a_gpu_is_not() -> None:
    assert not EngineConfig().captures_graphs
    assert EngineConfig(device="cuda").captures_graphs
    assert EngineConfig(enforce_eager=False).captures_graphs
    assert not EngineConfig(device="cuda", enforce_eager=True).captures_graphs


def test_progress_is_shown_at_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = sizes_up_to(MOST)

    def capture() -> str:
        ModelRunner(LOADED, 2, 16, "cpu", "float32").capture(sizes)
        return capsys.readouterr().err

    assert capture() == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = capture()
    assert "Capturing CUDA graphs" in shown
    assert "100%" in shown


class NoLaunch:
    """Stands where a kernel does, and runs nothing: tensors without data have nothing to run on."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> NoLaunch:
        assert all(isinstance(size, int) for size in grid)
        return self

    def __call__(self, *_: object, **__: object) -> None:
        self.launches += 1


def test_nothing_in_a_captured_step_looks_at_a_tensors_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without data such a look raises. All but the kernels themselves is what runs on a GPU."""
    pytest.importorskip("triton", reason="needs triton: pip install -e .[engine]")
    from kvscope.kernels import kv_write, paged_decode, rms_norm, rotary

    launches = NoLaunch()
    for module, name in (
        (kv_write, "kv_write_kernel"),
        (paged_decode, "paged_decode_kernel"),
        (paged_decode, "reduce_pieces_kernel"),
        (rms_norm, "rms_norm_kernel"),
        (rotary, "rotary_kernel"),
    ):
        monkeypatch.setattr(module, name, launches)
    for place in ("kvscope.engine.execution.attention.run_on", "kvscope.engine.models.layers.run_on"):
        monkeypatch.setattr(place, lambda _: True)
    model = Llama(tiny.checkpoint(0, torch.float32, "meta"), None)
    cache = PagedKV(model.config, 2, 16, "meta", torch.float32)
    for size in (1, MOST):
        launched = launches.launches
        batch = static_inputs(size, model.config, 16, "meta")
        hidden = model.forward(batch.token_ids, batch.positions, BatchAttention(cache, batch))
        assert hidden.shape == (size, tiny.CONFIG["hidden_size"])
        assert launches.launches - launched > 5 * model.config.num_layers


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: graphs are captured on one only")
def test_captured_on_a_gpu_tokens_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"device": "cuda", "kv_cache_memory_bytes": 1 << 26}
    loaded = load_model(EngineConfig(model=TINY, device="cuda"))
    eager = stated(loaded, settings, enforce_eager=True)
    with replayed(monkeypatch) as sizes:
        assert_same(eager, stated(loaded, settings, enforce_eager=False))
    assert MOST in sizes
