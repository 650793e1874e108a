"""Work done twice and caches that do not serve, brought about by a fault; with `fault=False` the same load without."""

from __future__ import annotations

from collections.abc import Iterable

from kvscope.monitor.contract.kinds import Preempt
from kvscope.monitor.detectors.detector import Settings
from tests.detectors.scenes import Spoken, Watched

Set = Iterable[str] | Settings


def on(code: str, fault: bool, keys: str = "") -> list[str]:
    return [code + keys] if fault else []


def preemption(settings: Set = (), *, fault: bool = True) -> Watched:
    """Eight prompts of 25 blocks, of which a pool of 40 holds one, are let in as long as a chunk has room."""
    faults = on("thrash.preemption", fault)
    scene = Watched(settings, total=41, max_num_batched_tokens=16, prefix_caching=False, faults=faults)
    for _ in range(8):
        scene.lab.arrive(100, max_tokens=4)
    scene.run_until_idle()
    return scene


def growth(settings: Set = (), *, fault: str = "", **lab: object) -> Watched:
    """Outputs of eight requests grow until the pool is full, in steps of which two overlap."""
    faults = [fault] if fault else []
    scene = Watched(settings, total=41, max_num_seqs=16, prefix_caching=False, faults=faults, **lab)
    for _ in range(8):
        scene.lab.arrive(15, max_tokens=30)
    while scene.lab.scheduler.has_work or scene.lab.in_flight:
        scene.steps(1)
    return scene


def cascade(settings: Set = (), *, fault: bool = True) -> Watched:
    """What preempted requests give back waits for the step in flight, and nobody waits for that."""
    return growth(settings, fault="thrash.cascade" if fault else "", async_scheduling=True)


def preempt_all(settings: Set = (), *, fault: bool = True) -> Watched:
    """Where one request lacks a block, all lose theirs."""
    return growth(settings, fault="collapse.preempt-all" if fault else "")


def after_retract(settings: Set = (), *, fault: bool = True) -> Watched:
    """Many small requests, six large ones, of which some are preempted, and many small ones again, in slow steps."""
    scene = Watched(settings, total=41, prefix_caching=False, faults=on("thrash.after-retract", fault))
    lab = scene.lab

    def small(count: int) -> None:
        for n in range(count):
            lab.arrive(4, max_tokens=4 + n * 7 % 23)

    small(60)
    scene.run_until_idle(seconds=0.1)
    for n in range(6):
        lab.arrive(16, max_tokens=40 + 8 * n)
    while not lab.scheduler.num_preemptions:
        scene.steps(1, seconds=0.1)
    small(400)
    return scene


def prefix_hits(settings: Set = (), *, fault: bool = True, shared: bool = True) -> Watched:
    """One prompt of ten blocks after the other, all with the same beginning (`shared`), or each of its own."""
    scene = Watched(settings, total=201, faults=on("collapse.prefix-hits", fault))
    beginning = list(range(40))
    for _ in range(15):
        first = beginning if shared else [scene.lab.rng.randrange(1000) for _ in beginning]
        scene.lab.arrive([*first, scene.lab.rng.randrange(1000)], max_tokens=2)
        scene.run_until_idle()
    return scene


def flushed_needlessly(settings: Set = (), *, fault: bool = True) -> Watched:
    """A beginning that everybody shares is the first to go whenever something else runs in between."""
    scene = Watched(settings, total=121, faults=on("collapse.cache-flushed", fault))
    shared = list(range(40))
    for _ in range(10):
        scene.lab.arrive([*shared, scene.lab.rng.randrange(1000)], max_tokens=2)
        scene.run_until_idle()
        scene.lab.arrive(60, max_tokens=2)
        scene.run_until_idle()
    return scene


def flushed_by_one(settings: Set = (), *, needed_again: bool = True, tokens: int = 440) -> Watched:
    """Ten prompts of ten blocks are cached; one of 110 blocks comes, in a pool of 120; then the ten again."""
    scene = Watched(settings, total=121)
    prompts = [[1000 * n + token for token in range(41)] for n in range(10)]
    for prompt in prompts:
        scene.lab.arrive(prompt, max_tokens=1)
        scene.run_until_idle()
    scene.lab.arrive(tokens, max_tokens=1, name="the-huge-one")
    scene.run_until_idle()
    for prompt in prompts if needed_again else []:
        scene.lab.arrive(prompt, max_tokens=1)
        scene.run_until_idle()
    return scene


def wrong_sizes(settings: Settings) -> None:
    """Everything that is about sizes, looked at once: a small pool, large blocks, and two bills."""
    scene = Spoken(total=5, max_model_len=64, max_num_seqs=8, kv_bytes_per_block=1)
    scene.watch.settings = settings
    for number in range(4):
        scene.arrive(number, [1 + number])
    for number in range(4):
        scene.log.preempted(number, Preempt.KV_BLOCKS, 9, 1, 4)
    total, kept, pool = 1 << 40, 1 << 36, 1 << 38
    for graphs, estimated in ((kept, 0), (1, kept)):
        breakdown = (0, 0, estimated, graphs, 0, pool, -1, -1, pool, pool)
        scene.log.memory([total, 0, total, 0, *breakdown])
        scene.wait(1)
    coarse = Watched(settings, block_size=256, total=9)
    for _ in range(4):
        coarse.lab.arrive(8)
    coarse.live(1)
