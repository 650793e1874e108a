"""Record the incidents of docs/investigations on vLLM's scheduler, in virtual time.

    PYTHONPATH=. VLLM_PYTHON -m scripts.investigation_recordings [NAME …]

VLLM_PYTHON is a Python that has vLLM, such as .venv-vllm/bin/python (`sh scripts/vllm.sh`). Each incident has the pool,
the prompts and the limits of its public report, where the report has them, and the fault of that report from
the incident lab. Nothing computes a token: a model of step times stands in for the device. Each recording becomes a
support bundle, docs/investigations/NAME.zip, of at most 100 kB.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvscope.engine.bench.latencies import OutsideTimes
from kvscope.engine.bench.simulated_engine import StepTime
from kvscope.lab.client_load import Clients
from kvscope.lab.draws import Draw
from kvscope.lab.on_vllm.fault_table import release_tuple
from kvscope.lab.on_vllm.vllm_draws import VllmDraw
from kvscope.lab.on_vllm.vllm_end import VllmRun
from kvscope.monitor.terminal.cli import main as monitor

FOLDER: Final = Path(__file__).resolve().parents[1] / "docs" / "investigations"
ENGINE: Final[Mapping[str, Any]] = {
    "block_size": 16,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 8192,
    "async_scheduling": False,
    "scheduling_policy": "fcfs",
    "enable_prefix_caching": False,
    "kv_connector": "",
    "kv_lease_seconds": 0.0,
}


def incident(
    engine: Mapping[str, Any], load: tuple[Clients, ...], seconds: float, fault: str = "", **more: Any
) -> VllmDraw:
    """Return an episode on an engine that differs from ENGINE in `engine`. more: fields of Draw and of VllmDraw."""
    fetched = more.pop("fetched", 0.0)
    base = Draw(
        number=0,
        seed=more.pop("seed", 2026),
        faults=(),
        engine={**ENGINE, **engine},
        load=load,
        step_time=more.pop("step_time", StepTime(base_s=0.05, per_token_s=50e-6)),
        latencies=more.pop("latencies", OutsideTimes()),
        max_model_len=more.pop("max_model_len"),
        seconds=seconds,
        steps=more.pop("steps", 1_000_000),
        scrape_s=15.0,
    )
    return VllmDraw(base, release_tuple("0.32.0"), fault, fetched=fetched, **more)


CHATS: Final = Clients("chat", rate=0.5, until_s=160, prompt=(300, 2000), output=(50, 150))


def waves(at_once: int) -> VllmDraw:
    """Return the load of the report, 80,000 tokens in and 800 out, on its pool of 1,494,221 tokens."""
    return incident(
        {"num_gpu_blocks_override": 1_494_221 // 256 + 1, "block_size": 256, "max_num_batched_tokens": 65_536},
        (Clients("bench", at_once=at_once, pause_s=1.0, until_s=400, prompt=(80_000, 80_000), output=(800, 800)),),
        160,
        step_time=StepTime(base_s=0.02, per_token_s=50e-6),
        max_model_len=262_144,
    )


INCIDENTS: Final[Mapping[str, VllmDraw]] = {
    "usage-drops-to-zero-18": waves(18),
    "usage-drops-to-zero-15": waves(15),
    "larger-than-the-pool": incident(
        {"num_gpu_blocks_override": 76_640 // 16 + 1},
        (
            CHATS,
            Clients("large", times=(30.0,), prompt=(100_000, 100_000), output=(10, 10), patience_s=90),
        ),
        140,
        "larger-than-pool",
        max_model_len=262_144,
    ),
    "fetch-never-ends": incident(
        {"num_gpu_blocks_override": 513, "kv_connector": "host"},
        (Clients("f", rate=0.5, until_s=100, prompt=(400, 1200), output=(50, 150)),),
        180,
        "load-never-ends",
        fetched=1.0,
        max_model_len=4096,
        latencies=OutsideTimes(copy_s=0.05, copy_block_s=0.001),
    ),
    "deferred-fill-the-slots": incident(
        {"num_gpu_blocks_override": 4097, "kv_connector": "host", "max_num_seqs": 16},
        (Clients("f", rate=0.5, until_s=160, prompt=(400, 1200), output=(50, 150)),),
        120,
        "load-never-promoted",
        fetched=1.0,
        max_model_len=4096,
        latencies=OutsideTimes(copy_s=0.05, copy_block_s=0.001),
    ),
    "step-never-returns": incident(
        {"num_gpu_blocks_override": 2049},
        (CHATS,),
        120,
        "step-hangs",
        max_model_len=4096,
        steps=10_000,
    ),
}


def main() -> None:
    """Write the bundles."""
    for name in sys.argv[1:] or INCIDENTS:
        with tempfile.TemporaryDirectory(prefix="kvscope-") as directory:
            recording, bundle = Path(directory, "recording"), FOLDER / f"{name}.zip"
            recording.mkdir()
            run = VllmRun(INCIDENTS[name], recording, Path(directory, "model"))
            run.watch()
            bundle.unlink(missing_ok=True)
            if monitor(["bundle", "--keep-ids", str(recording), str(bundle)]):
                sys.exit(f"{name}: the bundle was not written")


if __name__ == "__main__":
    main()
