"""One step at a time: the same logits whatever else is in the batch, and KV that can be taken out and put back."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e .[engine]")

import torch

from kvscope.engine.blocks.block_pool import NULL_BLOCK
from kvscope.engine.config import EngineConfig
from kvscope.engine.execution.model_runner import ModelRunner, Runner, kv_bytes_per_block, num_blocks_for
from kvscope.engine.models import load_model
from kvscope.engine.requests.request import Request, Sampled, SamplingParams
from tests.engine.steps import execute, plan

BLOCK_SIZE = 4
BLOCKS = 64
LOADED = load_model(EngineConfig())


def runner(dtype: str = "float32") -> ModelRunner:
    loaded = LOADED if dtype == "float32" else load_model(EngineConfig(dtype=dtype))
    return ModelRunner(loaded, BLOCKS, BLOCK_SIZE, "cpu", dtype)


def request(number: int, prompt: list[int], computed: int = 0) -> Request:
    made = Request(number, f"r-{number}", prompt, SamplingParams(temperature=0))
    made.num_computed_tokens = computed
    return made


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (length,), generator=generator).tolist()


def stated(run: ModelRunner, one: Request, table: list[int], num_tokens: int) -> list[Sampled]:
    got = execute(run, plan((one, num_tokens)), {one.number: table})
    one.num_computed_tokens += num_tokens
    return got


def test_only_requests_at_their_end_get_a_token_in_the_order_of_the_plan() -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate([9, 1, 30, 2, 17])]
    tables = {number: list(range(1 + 8 * number, 9 + 8 * number)) for number in range(5)}
    alone = [stated(runner(), request(n, prompts[n]), tables[n], len(prompts[n])) for n in range(5)]
    assert len({tuple(tokens) for tokens in alone}) > 1

    run = runner()
    requests = [request(number, prompts[number]) for number in range(5)]
    # 2 and 4 are cut short, the others reach their end.
    counts = {3: 2, 2: 11, 1: 1, 4: 16, 0: 9}
    got = execute(run, plan(*((requests[number], count) for number, count in counts.items())), tables)
    assert got == alone[3] + alone[1] + alone[0]
    for number, count in counts.items():
        requests[number].num_computed_tokens = count
    # The rest of both, one in a chunk of 1 and one in a longer chunk.
    assert execute(run, plan((requests[4], 1), (requests[2], 19)), tables) == alone[4] + alone[2]


def test_a_step_that_ends_no_prompt_samples_nothing() -> None:
    assert stated(runner(), request(1, prompt(10, 0)), [1, 2, 3], 6) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kv_taken_out_and_put_back_elsewhere_is_the_same(dtype: str) -> None:
    run = runner(dtype)
    tokens = prompt(11, 3)
    expected = stated(run, request(1, tokens), [5, 9, 7], 11)
    kv = run.gather([5, 9])
    assert kv.nbytes == 2 * kv_bytes_per_block(LOADED.config, BLOCK_SIZE, dtype)
    run.scatter([5, 9], torch.zeros_like(kv))
    assert not run.gather([9]).any()
    run.scatter([40, 41], kv)
    assert torch.equal(run.gather([41, 40]), kv[:, :, [1, 0]])
    assert stated(run, request(2, tokens, computed=8), [40, 41, 42], 3) == expected


def test_nothing_is_written_outside_of_the_tables() -> None:
    run = runner()
    tables = {1: [3, 4, 5], 2: [10]}
    execute(run, plan((request(1, prompt(9, 0)), 9), (request(2, prompt(2, 1)), 2)), tables)
    execute(run, plan((request(3, prompt(3, 2)), 3), (request(2, prompt(3, 1), computed=2), 1)), {2: [10], 3: [20]})
    written = {block for block in range(BLOCKS) if run.gather([block]).any()}
    assert written == {3, 4, 5, 10, 20}
    assert NULL_BLOCK not in written


def test_the_pool_is_as_large_as_its_memory_or_as_told() -> None:
    model = LOADED.config
    block = kv_bytes_per_block(model, BLOCK_SIZE, "float16")
    assert 2 * block == kv_bytes_per_block(model, BLOCK_SIZE, "float32") == runner().gather([1]).nbytes
    settings = {"block_size": BLOCK_SIZE, "dtype": "float16"}
    assert num_blocks_for(EngineConfig(kv_cache_memory_bytes=7 * block + 1, **settings), model) == 7
    both = EngineConfig(num_gpu_blocks_override=5, kv_cache_memory_bytes=7 * block, **settings)
    assert num_blocks_for(both, model) == 5
    with pytest.raises(ValueError, match="kv_cache_memory_bytes"):
        num_blocks_for(EngineConfig(kv_cache_memory_bytes=2 * block - 1, **settings), model)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("block_size", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("kv_cache_memory_bytes", 0),
        ("num_gpu_blocks_override", 1),
        ("max_model_len", 1),
        ("scheduling_policy", "lifo"),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("kv_connector", "cloud"),
        ("hash_key", b"x" * 65),
        ("model", ""),
        ("faults", ("no.such",)),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(setting: str, value: object) -> None:
    with pytest.raises(ValueError, match="fault" if setting == "faults" else setting):
        EngineConfig(**{setting: value})


def test_a_gpu_is_taken_where_there_is_one_and_the_type_that_suits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvscope.engine.config.GPU_NODES", (str(tmp_path / "nvidiactl"),))
    assert (EngineConfig().device, EngineConfig().dtype) == ("cpu", "float32")
    (tmp_path / "nvidiactl").touch()
    assert (EngineConfig().device, EngineConfig().dtype) == ("cuda", "auto")
    assert (EngineConfig(device="cpu").device, EngineConfig(device="cpu").dtype) == ("cpu", "float32")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert EngineConfig().device == "cpu"


def test_whatever_runs_runs_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, and each thread has its own current one."""
    entered: list[object] = []

    def current(device: object) -> AbstractContextManager[None]:
        entered.append(device)
        return nullcontext()

    run = runner()
    monkeypatch.setattr("torch.cuda.device", current)
    monkeypatch.setattr("torch.cuda.synchronize", entered.append)
    monkeypatch.setattr(run, "_device", "cuda:1")
    run.check()
    assert entered == ["cuda:1", "cuda:1"]
    assert {name for name in vars(Runner) if not name.startswith("_")} == {
        name for name in vars(ModelRunner) if hasattr(getattr(ModelRunner, name), "__wrapped__")
    }


def test_a_copy_in_parts_is_the_copy_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = runner()
    stated(run, request(1, prompt(30, 1)), list(range(1, 9)), 30)
    blocks = [3, 1, 8, 2, 7, 5, 4]
    whole = run.gather(blocks)
    monkeypatch.setattr("kvscope.engine.execution.model_runner.COPY_BYTES", 3 * whole[:, :, 0].numel() * 4)
    assert torch.equal(run.gather(blocks), whole)
    run.scatter([block + 20 for block in blocks], whole)
    assert torch.equal(run.gather([block + 20 for block in blocks]), whole)
    assert not whole.eq(0).all()
