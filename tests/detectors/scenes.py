"""Incidents brought about, each frame of them fed to a Pipeline as it is sent.

`Watched` is a lab (the real pool and scheduler) under observation; `Spoken` an engine of which only the words are
there, for what the real pool never does.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvscope.engine.bench.clock import VirtualClock
from kvscope.engine.requests.request import Request
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.kinds import Kind
from kvscope.monitor.contract.wire import Batch, Run, batch_of
from kvscope.monitor.detectors.detector import Settings
from tests.detectors.spoken import ENGINE as ENGINE
from tests.detectors.spoken import INSTANT_COPIES as INSTANT_COPIES
from tests.detectors.spoken import NOTHING_SAID as NOTHING_SAID
from tests.detectors.spoken import Observer as Observer
from tests.detectors.spoken import Spoken as Spoken
from tests.detectors.spoken import recorded as recorded
from tests.detectors.spoken import value as value
from tests.detectors.spoken import with_instant_copies


class Watched(Observer):
    """A lab whose every frame goes to a Pipeline at once. `settings` as `--set` takes them."""

    def __init__(self, settings: Iterable[str] | Settings = (), **lab: object) -> None:
        super().__init__(with_instant_copies(settings))
        self.lab = Lab(engine=ENGINE, **lab)  # type: ignore[arg-type]
        self._fed = 0
        self.look()

    @property
    def now_ns(self) -> int:
        return self.lab.clock.time_ns()

    def look(self) -> None:
        """Feed what was sent since last time."""
        new = self.lab.frames[self._fed :]
        self._fed += len(new)
        self.watch.feed(new)

    def skip(self) -> None:
        """What was sent since last time is lost for good."""
        self._fed = len(self.lab.frames)

    def steps(self, count: int, seconds: float = 0.01) -> None:
        for _ in range(count):
            self.lab.step(seconds)
            self.look()

    def run_until_idle(self, seconds: float = 0.01) -> None:
        for _ in range(10_000):
            if not self.lab.scheduler.has_work:
                return
            self.steps(1, seconds)
        raise AssertionError("not idle after 10,000 steps")

    def live(self, seconds: float, every: float = 0.5) -> None:
        """The engine's loop turns, with work or without, and its heart beats, for so long."""
        for _ in range(round(seconds / every)):
            self.steps(1, every)
            self.lab.heartbeat()
            self.look()
            self.watch.settle()

    def launch(self) -> None:
        """A step is launched and does not come back: for as long as only `beat` or `silence` follow."""
        lab = self.lab
        lab.log.tick()
        plan = lab.scheduler.schedule()
        assert plan.shares
        lab.launched = (plan.step, lab.clock.monotonic_ns())
        lab.flush()
        self.look()

    def beat(self, seconds: float, every: float = 0.5) -> None:
        """Time passes; the drain thread lives, the engine's own does nothing."""
        for _ in range(round(seconds / every)):
            self._pass(every)
            self.lab.heartbeat()
            self.look()
            self.watch.settle()

    def silence(self, seconds: float, every: float = 0.5) -> None:
        """Time passes and nothing is heard; the source says how late it is."""
        for _ in range(round(seconds / every)):
            self._pass(every)
            self.watch.feed([observed(self.now_ns, self.lab.packer.epoch)])
            self.watch.settle()

    def _pass(self, seconds: float) -> None:
        assert isinstance(self.lab.clock, VirtualClock)
        self.lab.clock.sleep(seconds)


def observed(wall_ns: int, epoch: int) -> Batch:
    """What a source adds while it hears nothing."""
    return batch_of(ENGINE, epoch, [Run(Kind.OBSERVED, 0, -1, [wall_ns], [])], wall_ns=wall_ns)


# -------------------------------------------------------------------- incidents


def finished_held(fault: str = "leak.finished-held", settings: Iterable[str] | Settings = ()) -> Watched:
    """Six requests have ended; the connector's word for those the fault strikes never arrives."""
    scene = Watched(settings, connector_share=1.0, faults=[fault] if fault else ())
    for n in range(6):
        scene.lab.arrive(10 + n, max_tokens=4)
    scene.run_until_idle()
    scene.steps(10)
    return scene


def unaccounted(fault: str = "leak.unaccounted", settings: Iterable[str] | Settings = ()) -> Watched:
    """Three requests share a prefix of five blocks; the first is aborted, and the fault skips its free."""
    scene = Watched(settings, faults=[fault] if fault else ())
    prefix = list(range(20))
    scene.lab.arrive([*prefix, 1], max_tokens=400)
    scene.steps(3)
    scene.lab.arrive([*prefix, 2], max_tokens=60)
    scene.lab.arrive([*prefix, 3], max_tokens=60)
    scene.steps(5)
    scene.lab.abort(scene.lab.scheduler.running[0])
    scene.steps(1)
    return scene


def never_fits(settings: Iterable[str] | Settings = (), tokens: int = 300) -> tuple[Watched, Request]:
    """A request of 75 blocks comes to a pool of 64, and two small ones behind it."""
    scene = Watched(settings)
    big = scene.lab.arrive(tokens, name="the-big-one")
    scene.lab.arrive(8, name="small-1")
    scene.lab.arrive(8, name="small-2")
    scene.steps(1)
    return scene, big


def stalled(settings: Iterable[str] | Settings = ()) -> Watched:
    """Steps have been completed; then one of two running requests is launched and does not come back."""
    scene = Watched(settings)
    scene.lab.arrive(20, max_tokens=100)
    scene.lab.arrive(20, max_tokens=100)
    scene.steps(60)
    scene.launch()
    return scene


def lockstep(
    waves: int = 2, *, spread: bool = False, settings: Iterable[str] | Settings = (), clients: int = 8
) -> Watched:
    """Closed loop: each client sends its next request 0.3 s (so long it is tokenised) after its last has ended.

    Prompts are prefilled one a step, in slow steps. `spread` gives every request another output length.
    """
    scene = Watched(settings, total=161, prefix_caching=False, max_num_batched_tokens=64, max_num_seqs=clients)
    lab = scene.lab
    due = [scene.now_ns] * clients
    sent = ended = 0
    while ended < clients * waves:
        while due and due[0] <= scene.now_ns and sent < clients * waves:
            due.pop(0)
            sent += 1
            lab.arrive(60, max_tokens=20 + (sent * 37 % 200 if spread else 0))
        prefilling = any(r.num_computed_tokens < r.num_prompt_tokens for r in lab.scheduler.requests.values())
        for _ in lab.step(0.4 if prefilling else 0.01):
            ended += 1
            due.append(scene.now_ns + 300_000_000)
        scene.look()
    return scene
