"""The memory bill that the probe reads from vLLM's worker, as its releases keep it: the figures add up to the share."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvscope.lab.vllm_python import PYTHON, ROOT, announce, environment, free_ports, needs_vllm, save_model
from kvscope.monitor.contract.kinds import SCHEMA, Kind
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.memory_breakdown import measured
from kvscope.monitor.probes.vllm.vllm_description import breakdown
from kvscope.monitor.sources.live_stream import LiveStream
from kvscope.monitor.terminal.cli import main
from scripts.tiny_model import save_tokenizer
from tests.engine.process import follow

GIB = 1 << 30
TOTAL, SHARE = 80 * GIB, 0.9
WEIGHTS, NON_TORCH, PEAK, GRAPHS = 15 * GIB + 3, GIB + 7, 2 * GIB + 11, GIB // 2 + 13
BLOCKS, LAYERS, PAGE = 10, 3, 4096


class Core:
    """Makes a scheduler as vLLM's EngineCore does: in a method, with the executor at hand."""

    def __init__(self, worker: Any, world_size: int = 1) -> None:
        self.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
        self.figures = self._make(world_size)

    def _make(self, world_size: int) -> list[int]:
        parallel = SimpleNamespace(world_size=world_size)
        return breakdown(SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel)))


def on_a_device(*, together: bool, estimates: bool, in_peak: bool, eager: bool = False, kept: bool = True) -> Any:
    """A worker that measured, with the attributes that a release has.

    together: one figure for weights and non-torch, as from 0.27 on. estimates: the graphs, from 0.18 on; in_peak:
    the peak has them, as in 0.18 and from 0.27 on.
    """
    graphs = GRAPHS if estimates and kept else 0
    requested = int(TOTAL * SHARE)
    worker = SimpleNamespace(
        device=torch.device("cpu"),
        model_config=SimpleNamespace(enforce_eager=eager),
        requested_memory=requested,
        model_runner=SimpleNamespace(model_memory_usage=WEIGHTS, kv_caches=tensors()),
        init_snapshot=SimpleNamespace(total_memory=TOTAL),
        peak_activation_memory=PEAK + (graphs if in_peak else 0),
        available_kv_cache_memory_bytes=requested - WEIGHTS - NON_TORCH - PEAK - graphs,
    )
    if together:
        worker.total_consumed = WEIGHTS + NON_TORCH
    else:
        worker.non_torch_memory = NON_TORCH
    if estimates:
        worker.cudagraph_memory_estimate = GRAPHS
    return worker


def tensors() -> list[Any]:
    """Layers over one piece of memory, one with a piece of its own in two tensors, one with none."""
    shared = torch.zeros(BLOCKS * PAGE, dtype=torch.int8)
    other = torch.zeros(2, BLOCKS * PAGE, dtype=torch.int8)
    return [shared.view(BLOCKS, PAGE), shared.view(PAGE, BLOCKS), [other[0], other[1]], None]


@pytest.fixture(autouse=True)
def envs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's settings, of which one counts."""
    envs = ModuleType("vllm.envs")
    envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS = True  # type: ignore[attr-defined]
    package = ModuleType("vllm")
    package.envs = envs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)
    return envs  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("together", "estimates", "in_peak"),
    [(False, False, False), (False, True, True), (False, True, False), (True, True, True)],
    ids=["0.10 to 0.17", "0.18", "0.20 to 0.26", "0.27 and later"],
)
@pytest.mark.parametrize("kept", [True, False])
def test_what_a_release_keeps_adds_up_to_what_it_took(
    together: bool, estimates: bool, in_peak: bool, kept: bool, envs: Any
) -> None:
    envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS = kept
    worker = on_a_device(together=together, estimates=estimates, in_peak=in_peak, kept=kept)
    known = measured(Core(worker).figures)
    graphs = {"graphs_estimated": GRAPHS if kept else 0} if estimates else {}
    assert known == graphs | {
        "device_total": TOTAL,
        "weights": WEIGHTS,
        "non_torch": NON_TORCH,
        "activations_peak": PEAK,
        "kv_pool": BLOCKS * PAGE * LAYERS,
    }
    parts = sum(known.get(name, 0) for name in ("weights", "non_torch", "activations_peak", "graphs_estimated"))
    assert parts + worker.available_kv_cache_memory_bytes == worker.requested_memory


def test_without_graphs_there_are_none_to_know_of() -> None:
    worker = on_a_device(together=True, estimates=True, in_peak=True, eager=True)
    assert measured(Core(worker).figures)["graphs_actual"] == 0


@pytest.mark.parametrize("estimates", [True, False])
def test_a_peak_that_does_not_add_up_is_not_known(estimates: bool) -> None:
    worker = on_a_device(together=estimates, estimates=estimates, in_peak=estimates)
    worker.peak_activation_memory += GIB
    known = measured(Core(worker).figures)
    assert known.keys() == {"device_total", "weights", "kv_pool", *(["graphs_estimated"] if estimates else [])}


def test_a_worker_that_was_told_the_size_has_not_measured() -> None:
    worker = on_a_device(together=True, estimates=True, in_peak=True)
    for name in ("available_kv_cache_memory_bytes", "peak_activation_memory", "total_consumed"):
        delattr(worker, name)
    assert measured(Core(worker).figures).keys() == {"device_total", "weights", "kv_pool"}


def test_on_the_cpu_the_pool_is_all_that_is_known() -> None:
    runner = SimpleNamespace(kv_caches=tensors())
    figures = Core(SimpleNamespace(device=torch.device("cpu"), model_runner=runner)).figures
    assert measured(figures) == {"kv_pool": BLOCKS * PAGE * LAYERS}
    assert len(figures) == len(SCHEMA[Kind.MEMORY].args)


def test_several_workers_and_those_of_other_processes_are_not_asked() -> None:
    worker = on_a_device(together=True, estimates=True, in_peak=True)
    assert Core(worker, world_size=2).figures == []
    assert Core(None).figures == []


IN_ONE_PROCESS = """
import sys
from vllm import LLM
llm = LLM(
    sys.argv[1], load_format="dummy", served_model_name="tiny", enforce_eager=True, dtype="float32", block_size=32,
    num_gpu_blocks_override=200, kv_cache_memory_bytes=1 << 26, max_model_len=1024, max_num_seqs=8,
)
print("made", flush=True)
sys.stdin.read()
"""


@needs_vllm
@pytest.mark.slow
def test_a_vllm_in_one_process_says_what_its_pool_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU with a process for all; with one for the worker, as its server has it, nothing can be read."""
    model = save_model(tmp_path / "model")
    save_tokenizer(model)
    port = free_ports()
    events = f"tcp://127.0.0.1:{port}"
    of_vllm = environment(
        PYTHONPATH=f"{ROOT}{os.pathsep}{announce(tmp_path)}",
        KVSCOPE_EVENTS=events,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    log = tmp_path / "log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [PYTHON, "-c", IN_ONE_PROCESS, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=of_vllm,
            cwd=tmp_path,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert any(line == "made\n" for line in process.stdout), log.read_text()
            ledger = EngineLedger(f"tiny@127.0.0.1:{port}/0")
            with contextlib.closing(LiveStream(events)) as stream:
                follow(stream, [ledger], lambda: ledger.ready)
            assert measured(ledger.state.memory) == {"kv_pool": 200 * ledger.description.kv_bytes_per_block}
            assert main(["explain", "memory", events]) == 0
            assert "kv pool" in capsys.readouterr().out
        finally:
            process.kill()
