"""What a step sends to the device and waits for: one upload, and one wait, for its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e .[engine]")

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvscope.engine.config import EngineConfig
from kvscope.engine.execution import input_batch
from kvscope.engine.execution.model_runner import ModelRunner
from kvscope.engine.models import load_model
from kvscope.engine.requests.request import Request, SamplingParams
from tests.engine.steps import plan

LOADED = load_model(EngineConfig())
UPLOADS = {torch.tensor, torch.as_tensor, torch.from_numpy}
WAITS = {
    getattr(Tensor, name)
    for name in ("tolist", "item", "numpy", "nonzero", "bincount", "__bool__", "__int__", "__float__", "__index__")
} | {torch.nonzero, torch.unique, torch.masked_select, torch.bincount}
INDEXING = {Tensor.__getitem__, Tensor.__setitem__}


class Traffic(TorchFunctionMode):
    """Counts the calls that, on a GPU, bring numbers of the host there, and those for whose result the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, given: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        indices = given[1] if function in INDEXING else ()
        indices = indices if isinstance(indices, tuple) else (indices,)
        if function in UPLOADS or any(isinstance(index, list) for index in indices):
            self.calls["uploads"] += 1
        if function in WAITS or any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices):
            self.calls["waits"] += 1
        return function(*given, **(named or {}))


def no_attention(query: Tensor, *_: object) -> Tensor:
    """Stands for the kernels, which run where there is no GPU in the interpreter only."""
    return torch.zeros_like(query, memory_format=torch.contiguous_format)


def request(number: int, computed: int, tokens: int, **params: Any) -> Request:
    made = Request(number, "", [1 + number] * (computed + tokens), SamplingParams(**params))
    made.num_computed_tokens = computed
    return made


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 5, "min_p": 0.1, "seed": 3},
        {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 1.0, "logit_bias": {5: 1.0}, "min_tokens": 3},
    ],
    ids=str,
)
def test_a_step_has_one_upload_and_one_wait(
    params: dict[str, Any], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_batch, "run_on", lambda _: True)
    run = ModelRunner(LOADED, 64, 16, "cpu", "float32")
    monkeypatch.setattr(run._cache, "decode", no_attention)
    monkeypatch.setattr(run._cache, "prefill", no_attention)
    from_buffer, buffers = torch.frombuffer, []
    monkeypatch.setattr(torch, "frombuffer", lambda *a, **k: buffers.append(a) or from_buffer(*a, **k))
    if graphs:
        run.capture([4])
    tables = {number: [list(range(1 + 8 * number, 9 + 8 * number))] for number in range(4)}
    for shares in ([(40, 1)] * 4, [(40, 1), (41, 1), (0, 20), (16, 9)]):
        step = plan(*((request(n, start, count, **params), count) for n, (start, count) in enumerate(shares)))
        buffers.clear()
        with Traffic() as traffic:
            batch = run.prepare(step, tables)
            outcome = run.run(batch)
            assert (len(buffers), traffic.calls) == (1, {})
            assert len(outcome()) == 4
        assert (len(buffers), traffic.calls) == (1, {"waits": 1})


def test_what_the_last_step_chose_goes_on_without_the_host() -> None:
    """A step is prepared and started before the tokens of the one before it are there, as with async_scheduling."""
    runs = [ModelRunner(LOADED, 64, 16, "cpu", "float32") for _ in range(2)]
    tables = {number: [list(range(1 + 8 * number, 9 + 8 * number))] for number in range(3)}
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 1}, {"temperature": 0.0, "frequency_penalty": 2.0}]
    waited, ahead = ([request(n, 0, 20 + n, **kind) for n, kind in enumerate(kinds)] for _ in range(2))
    expected = []
    for count in (None, 1, 1, 1):
        expected.append([one.token_id for one in _step(runs[0], waited, count, tables)()])
        for one, token in zip(waited, expected[-1], strict=True):
            one.append(token)
    outcomes = []
    for count in (None, 1, 1, 1):
        outcomes.append(_step(runs[1], ahead, count, tables))
        for one in ahead:
            one.num_output_placeholders += 1
        if len(outcomes) > 1:  # one step behind
            for one, sampled in zip(ahead, outcomes[-2](), strict=True):
                one.append(sampled.token_id)
                one.num_output_placeholders -= 1
    assert [[one.token_id for one in outcome()] for outcome in outcomes] == expected


def _step(run: ModelRunner, requests: list[Request], count: int | None, tables: Any) -> Callable[[], Any]:
    """Start a step of so many tokens of each request, or of its prompt, and count them as computed."""
    counts = [count or one.num_prompt_tokens for one in requests]
    step = plan(*zip(requests, counts, strict=True))
    step.shares = [share._replace(samples=True) for share in step.shares]
    outcome = run.run(run.prepare(step, tables))
    for one, computed in zip(requests, counts, strict=True):
        one.num_computed_tokens += computed
    return outcome
