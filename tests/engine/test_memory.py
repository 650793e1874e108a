"""The memory plan: its parts add up, its line is read as vLLM's, and a budget is kept under load."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e .[engine]")

from kvscope.engine.bench.clock import VirtualClock
from kvscope.engine.config import EngineConfig
from kvscope.engine.core.assembly import HOST_STORE_POOLS
from kvscope.engine.core.engine_core import EngineCore
from kvscope.engine.execution.cuda_graphs import sizes_up_to
from kvscope.engine.execution.memory_plan import DEVICE_HEADROOM, UNMEASURED, Cuda, Host, Meter, Plan, make_plan
from kvscope.engine.execution.model_runner import kv_bytes_per_block, num_blocks_for
from kvscope.engine.faults import PLACES, Faults
from kvscope.engine.models import load_model
from kvscope.engine.requests.request import SamplingParams
from kvscope.monitor.contract.event_log import EventLog, Flushed
from kvscope.monitor.contract.kinds import SCHEMA, Kind
from kvscope.monitor.contract.samples import Fact
from kvscope.monitor.ledger.memory_breakdown import GIB_B, breakdown_of, fit_requested, measured, rounding, use_all
from kvscope.monitor.sources.engine_log import Log
from kvscope.monitor.terminal.cli import main
from tests.engine.process import EngineProcess

SMALL: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64}
LOADED = load_model(EngineConfig(**SMALL))
BLOCK = kv_bytes_per_block(LOADED.config, EngineConfig().block_size, "float32")


def roomy(share: float = 0.9) -> EngineConfig:
    """A budget with some MiB of KV above what this process has in use, whatever ran in it before."""
    used = Host(None).read().used_here
    return EngineConfig(
        **SMALL, memory_budget=round((used + DEVICE_HEADROOM + (64 << 20)) / share), gpu_memory_utilization=share
    )


def plan_of(config: EngineConfig) -> Plan:
    return make_plan(config, LOADED, Host(config.memory_budget), faults=Faults.parse(config.faults))


IN_A_FRESH_PROCESS = """
import dataclasses, json, sys
from kvscope.engine.bench.clock import VirtualClock
from kvscope.engine.config import EngineConfig
from kvscope.engine.execution.memory_plan import Host, make_plan
from kvscope.engine.models import load_model
config = EngineConfig(**json.loads(sys.argv[1]))
print(json.dumps(dataclasses.asdict(make_plan(config, load_model(config), Host(config.memory_budget)))))
"""


def fresh_plan(**settings: int) -> Plan:
    """Of a process like an engine's at its start: one that has run for a while finds room in what it had before."""
    made = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, json.dumps({**SMALL, "memory_budget": 2 << 30, **settings})],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return Plan(**json.loads(made.stdout))


def read_back(plan: Plan, share: float) -> list[Fact]:
    log = Log("a.log", datetime(2026, 11, 21, tzinfo=UTC))
    return [record for record in log.records([plan.line(share)]) if isinstance(record, Fact)]


def test_the_parts_add_up_to_the_device_with_the_remainder_named() -> None:
    plan = fresh_plan()
    assert plan.weights == LOADED.weight_bytes
    assert min(plan.activations, plan.non_torch) > 0 == plan.graphs
    not_requested = plan.total - plan.requested
    parts = plan.weights + plan.activations + plan.non_torch + plan.graphs + plan.kv_pool
    assert 0 <= plan.total - not_requested - DEVICE_HEADROOM - parts < BLOCK
    assert plan.kv_pool == plan.num_blocks * BLOCK <= plan.fit_requested < plan.use_all


def test_the_line_is_read_as_vllms_and_the_sums_are_the_same() -> None:
    config = roomy()
    plan = plan_of(config)
    breakdown, notes = breakdown_of(read_back(plan, config.gpu_memory_utilization))
    assert notes == []
    for name, suggested in (("fit_requested", fit_requested(breakdown)), ("use_all", use_all(breakdown))):
        own = getattr(plan, name)
        assert suggested.short_by == 0
        assert abs(suggested.kv_cache_memory - own) <= rounding(breakdown)
    assert breakdown.kv_cache is not None
    assert abs(breakdown.kv_cache - plan.kv_pool) < 1e-4 * GIB_B


def test_a_share_that_cannot_be_met_says_by_how_much_and_nothing_negative() -> None:
    config = replace(roomy(), memory_budget=DEVICE_HEADROOM)
    with pytest.raises(ValueError, match=r"there is no room for KV, \d+ bytes are missing .* short by [\d.]+ GiB"):
        plan_of(config)
    # Told how large the pool is, it starts, and still says so.
    reported = plan_of(replace(config, kv_cache_memory_bytes=5 * BLOCK))
    assert reported.num_blocks == 5
    line = reported.line(config.gpu_memory_utilization)
    assert "cannot be met: it is short by" in line
    assert "-" not in line.replace("non-torch", "").replace("--kv-cache-memory", "")
    breakdown, _ = breakdown_of(read_back(reported, config.gpu_memory_utilization))
    assert abs(fit_requested(breakdown).short_by + reported.fit_requested) <= rounding(breakdown)


def test_a_share_of_more_than_the_machine_has_free_is_refused_by_how_much() -> None:
    machine = Host(None).read().total
    config = EngineConfig(**SMALL, memory_budget=2 * machine)
    with pytest.raises(ValueError, match=r"cannot be met: .* are [\d.]+ GiB more than is free") as found:
        plan_of(config)
    missing = float(re.findall(r"are ([\d.]+) GiB more", str(found.value))[0]) * GIB_B
    assert missing >= 2 * machine * config.gpu_memory_utilization - machine
    # Told how large the pool is, it takes the word for it.
    assert plan_of(replace(config, num_gpu_blocks_override=3)).num_blocks == 3


@pytest.mark.slow
def test_more_requests_at_a_time_leave_less_for_kv() -> None:
    few, many = fresh_plan(), fresh_plan(max_num_seqs=256, max_num_batched_tokens=1024)
    assert many.activations > few.activations
    assert many.kv_pool < few.kv_pool


def test_the_pool_that_is_asked_for_is_made_whatever_was_measured() -> None:
    config = roomy()
    assert plan_of(replace(config, num_gpu_blocks_override=7)).num_blocks == 7
    assert plan_of(replace(config, kv_cache_memory_bytes=9 * BLOCK + 1)).num_blocks == 9
    free = plan_of(EngineConfig(**SMALL))
    assert (free.num_blocks, free.is_measured) == (num_blocks_for(EngineConfig(**SMALL), LOADED.config), False)
    assert free.activations == free.non_torch == UNMEASURED


def test_a_host_store_in_the_same_memory_is_part_of_the_plan() -> None:
    config = replace(roomy(), kv_connector="host")
    core = EngineCore(config, LOADED)
    try:
        assert core.connector is not None
        kept = (core.plan.num_blocks + core.connector.capacity) * BLOCK
        assert core.plan.kv_pool * (1 + HOST_STORE_POOLS) == kept <= core.plan.fit_requested
    finally:
        core.close()


@pytest.mark.parametrize(
    ("setting", "value"), [("gpu_memory_utilization", 0.0), ("gpu_memory_utilization", 1.1), ("memory_budget", 0)]
)
def test_a_setting_that_cannot_be_is_refused_by_name(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=setting):
        EngineConfig(**{setting: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory_budget"):
        EngineConfig(memory_budget=GIB_B, device="cuda")


def test_the_device_is_looked_at_again_as_time_passes() -> None:
    clock = VirtualClock()
    log = EventLog(clock)
    budget = plan_of(roomy()).total
    meter = Meter(plan_of(roomy()), Host(budget), log, clock)

    def stated() -> list[dict[str, int]]:
        log.flush(0, 0, (0, 0, 0, 0))
        flushed = [Flushed(*log.flushed.popleft()) for _ in range(len(log.flushed))]
        return [measured(one.args) for one in flushed]

    meter.tick()
    meter.tick()
    (first,) = stated()
    assert first["device_total"] == budget
    # On the CPU torch counts nothing, and there are no graphs to estimate: not known, so not there.
    unknown = {"graphs_estimated", "allocator_reserved", "allocator_allocated"}
    assert first.keys() == {*SCHEMA[Kind.MEMORY].args, "elsewhere"} - unknown
    ballast = bytearray(os.urandom(64 << 20))
    meter.tick()
    assert stated() == []
    clock.sleep(3600)
    meter.tick()
    (again,) = stated()
    assert again["used_here"] - first["used_here"] > len(ballast) // 2


def test_a_running_engine_shows_its_bill(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    with EngineProcess("--memory-budget", "1G", "--events", f"ipc://{tmp_path}/events", *flags) as engine:
        assert main(["explain", "memory", engine.events, "--format", "json"]) == 0
        (figures,) = json.loads(capsys.readouterr().out)["engines"].values()
        assert main(["explain", "memory", engine.events]) == 0
        assert "elsewhere" in capsys.readouterr().out
        log = engine.log()
    assert figures["device_total"] == GIB_B
    assert figures["used_here"] <= GIB_B
    breakdown, _ = breakdown_of(
        f for f in Log("a.log", datetime(2026, 11, 21, tzinfo=UTC)).records(log.splitlines()) if isinstance(f, Fact)
    )
    assert abs(breakdown.weights - figures["weights"]) < 1e-4 * GIB_B
    assert abs(figures["fit_requested"] - fit_requested(breakdown).kv_cache_memory) <= rounding(breakdown)


UNDER_LOAD = r"""
import re, sys
from pathlib import Path
from kvscope.engine.serving.llm import LLM
from kvscope.engine.requests.request import SamplingParams
budget = int(sys.argv[1])
llm = LLM("tiny", memory_budget=budget, gpu_memory_utilization=1.0, max_model_len=512, max_num_seqs=16,
          max_num_batched_tokens=1024)
with llm:
    shared = "the same beginning, " * 18
    llm.generate([shared + str(n) * 60 for n in range(64)], SamplingParams(max_tokens=24, ignore_eos=True))
    plan = llm.core.plan
status = Path("/proc/self/status").read_text()
print(plan.kv_pool, *(int(re.search(rf"{name}:\s+(\d+)", status)[1]) * 1024 for name in ("VmRSS", "VmHWM")))
"""


@pytest.mark.slow
def test_a_budget_is_kept_under_load() -> None:
    budget = GIB_B
    done = subprocess.run(
        [sys.executable, "-c", UNDER_LOAD, str(budget)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    kv_pool, resident, peak = map(int, done.stdout.split())
    print(f"budget {budget:,}, pool {kv_pool:,}, resident {resident:,}, at most {peak:,}")
    assert 0 < kv_pool < resident <= peak <= budget


WITH_GRAPHS: dict[str, Any] = {**SMALL, "max_num_seqs": 64, "block_size": 1, "enforce_eager": False}
"""Inputs of decodes are a few tens of KiB: blocks of one token are less."""
TOKEN = kv_bytes_per_block(LOADED.config, 1, "float32")


def breakdown_with_graphs(share: float = 0.9, faults: tuple[str, ...] = ()) -> tuple[Plan, int]:
    """Of an engine that has started, and what it has left free."""
    config = EngineConfig(**{**roomy(share).__dict__, **WITH_GRAPHS, "faults": faults})
    core = EngineCore(config, LOADED)
    try:
        return core.plan, Host(config.memory_budget).read().free
    finally:
        core.close()


def suggested(plan: Plan) -> int:
    """What a user reads in the log: the pool to fit the share."""
    return int(re.findall(r"--kv-cache-memory=(\d+)` \S+ \S+ to fit", plan.line(0.9))[0])


def test_graphs_are_on_the_bill_as_estimated_and_as_captured(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        plan, _ = breakdown_with_graphs()
    rows, tables = WITH_GRAPHS["max_num_seqs"], WITH_GRAPHS["max_model_len"]
    # Token, position, slot and length of each row, int64, and its table, int32; and on the CPU nothing besides.
    assert plan.graphs == plan.graphs_estimated == rows * (8 * 4 + 4 * tables)
    parts = plan.weights + plan.activations + plan.non_torch + plan.graphs + plan.kv_pool
    assert 0 <= plan.requested - DEVICE_HEADROOM - parts < TOKEN
    facts = {
        record.name: record.value
        for record in Log("a.log", datetime(2026, 11, 21, tzinfo=UTC)).records(caplog.messages)
        if isinstance(record, Fact)
    }
    for name in ("memory_graphs_estimated_gib", "graph_capture_gib", "memory_graphs_gib"):
        assert abs(float(facts[name]) * GIB_B - plan.graphs) < 1e-4 * GIB_B


def test_every_sizing_fault_has_its_test() -> None:
    for code in PLACES:
        family, _, name = code.partition(".")
        assert family != "sizing" or f"test_sizing_{name.replace('-', '_')}" in globals()


@pytest.mark.parametrize("fault", [True, False])
def test_sizing_kv_too_small(fault: bool) -> None:
    """A pool that was to hold what may run holds a sixth of it, and requests are preempted."""
    length, count = 64, 8
    pool = (1 + count * length // EngineConfig().block_size) * BLOCK
    faults = ("sizing.kv-too-small",) if fault else ()
    settings = {**SMALL, "max_num_seqs": count, "kv_cache_memory_bytes": pool, "faults": faults}
    core = EngineCore(EngineConfig(**settings), LOADED)
    try:
        for _ in range(count):
            core.submit("", [1] * 8, SamplingParams(max_tokens=length - 8, ignore_eos=True))
        while core.in_flight:
            core.step()
        assert (core.scheduler.num_preemptions > 0) == fault
        assert (core.plan.kv_pool <= pool / 6) == fault
    finally:
        core.close()


@pytest.mark.parametrize("fault", [True, False])
def test_sizing_kv_too_large(fault: bool) -> None:
    """The graphs took more than was kept for them, hardly anything is free, and the advice is a smaller pool."""
    plan, free = breakdown_with_graphs(share=1.0, faults=("sizing.kv-too-large",) if fault else ())
    assert (plan.graphs > plan.graphs_estimated) == fault
    assert (free < DEVICE_HEADROOM / 2) == fault
    assert (suggested(plan) < plan.kv_pool) == fault


@pytest.mark.parametrize("fault", [True, False])
def test_sizing_overreserved(fault: bool) -> None:
    """Memory was kept for graphs that do not take it: the advice is a pool that is larger by so much."""
    plan, _ = breakdown_with_graphs(faults=("sizing.overreserved",) if fault else ())
    sizes = len(sizes_up_to(WITH_GRAPHS["max_num_seqs"]))
    assert plan.graphs_estimated == plan.graphs * (sizes if fault else 1)
    unused = plan.graphs_estimated - plan.graphs
    assert unused <= suggested(plan) - plan.kv_pool < unused + TOKEN


@pytest.mark.parametrize("fault", [True, False])
def test_sizing_bad_suggestion(fault: bool) -> None:
    """All is as it was planned, and yet the advice is a pool that is smaller than the one that fits."""
    plan, _ = breakdown_with_graphs(faults=("sizing.bad-suggestion",) if fault else ())
    assert plan.graphs == plan.graphs_estimated
    assert (suggested(plan) < plan.kv_pool) == fault
    without_kv = plan.weights + plan.activations + plan.non_torch + plan.graphs
    assert plan.requested - without_kv - DEVICE_HEADROOM - suggested(plan) == (plan.graphs if fault else 0)


MEMORY_HELD = """
from kvscope.engine.bench.clock import VirtualClock
from kvscope.engine.config import EngineConfig
from kvscope.engine.core.engine_core import EngineCore
from kvscope.engine.execution.memory_plan import device_of
from kvscope.engine.models import load_model
from kvscope.engine.requests.request import Request
from kvscope.engine.requests.request import SamplingParams
from kvscope.monitor.ledger.memory_breakdown import measured
from tests.engine.steps import plan
steps, rows = 10, 512
fault = f"sizing.elsewhere:after={steps}"
config = EngineConfig(
    memory_budget=1 << 30, num_gpu_blocks_override=2, max_num_seqs=rows, max_num_batched_tokens=rows, max_model_len=32,
    faults=(fault,),
)
loaded = load_model(config)
core = EngineCore(config, loaded)
step = plan(*((Request(number, "", [1], SamplingParams(temperature=0)), 1) for number in range(rows)))
batch = core.runner.prepare(step, dict.fromkeys(range(rows), [[1]]))
for runs in (steps, 5 * steps):
    for _ in range(runs):
        core.runner.run(batch)()
    now = device_of(config).read()
    print(now.used_here, measured(core.plan.event(now))["elsewhere"], runs * rows * loaded.config.vocab_size * 4)
core.close()
"""


@pytest.mark.slow
def test_sizing_elsewhere() -> None:
    """Memory that no line of the bill names is in use, and more of it with each step; without the fault there is none.

    In a process of its own, since one that has run for a while takes what it needs of what it had before.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_HELD],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    before, after = ([int(figure) for figure in line.split()] for line in done.stdout.splitlines())
    used, elsewhere, kept = after
    assert before[1] < kept / 4  # the process takes some pages by itself on a busy machine
    assert elsewhere > kept / 4
    assert used - before[0] > 0.9 * kept


def test_an_nvml_that_fails_while_the_engine_works_leaves_its_own_share_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> list[object]:
        raise OSError("the driver is gone")

    device = Cuda.__new__(Cuda)  # one whose driver answered at the start, and answers no longer
    device._processes = fails
    assert [device._used_here() for _ in range(3)] == [None] * 3
    assert caplog.text.count("NVML") == 1


def test_without_nvml_a_gpu_is_planned_by_what_torch_knows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This machine has no driver, as a container has that may compute only."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (60 << 30, 80 << 30))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 5 << 30)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: 4 << 30)
    device = Cuda("cuda:1")
    assert "NVML" in caplog.text
    assert device.read() == (80 << 30, 60 << 30, UNMEASURED, UNMEASURED, 5 << 30, 4 << 30)
    assert device.non_torch(0) == 15 << 30
