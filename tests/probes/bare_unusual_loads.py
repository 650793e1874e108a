"""Unusual loads on vLLM's bare Scheduler: healthy ones that could be mistaken for incidents, and faults beside a load.

Run by tests.probes.bare_incidents. None of them was known to the detectors when they were first run.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from kvscope.engine.bench.clock import VirtualClock
from kvscope.lab.on_vllm.scheduler_maker import AnyGrammar
from tests.probes.bare_queue_incidents import with_grammar
from tests.probes.connector_settings import CONNECTOR
from tests.probes.incident_scene import Open, Scene

PACE_S: Final = 0.1
"""A step's time: minutes of an engine take few of them."""


def live(scene: Scene, seconds: float, load: Callable[[], None] = lambda: None) -> None:
    """Passes for so long; `load` is called before each."""
    scene.run(seconds, load, PACE_S)


def living(scene: Scene, name: str) -> list[Any]:
    """The requests in the scheduler whose name begins so."""
    return [one for one in scene.scheduler.requests.values() if one.request_id.startswith(name)]


def keep_asking(scene: Scene, name: str, count: int, prompt_tokens: int, max_tokens: int, priority: int = 0) -> None:
    """So many of these at any time."""
    while len(living(scene, name)) < count:
        scene.ask(f"{name}-{scene.came}", prompt_tokens, max_tokens, priority)


def abort(scene: Scene, requests: list[Any]) -> None:
    """Their clients leave."""
    from vllm.v1.request import RequestStatus

    scene.scheduler.finish_requests([one.request_id for one in requests], RequestStatus.FINISHED_ABORTED)


# ---------------------------------------------------------------- healthy


def long_chunks_beside_decodes(begin: Open) -> None:
    """Prompts of eight chunks come beside short answers; a step with a chunk takes 40 times as long as one without."""
    scene = begin(blocks=600, max_num_seqs=8)
    for _ in range(6):
        live(scene, 15, lambda: keep_asking(scene, "chat", 6, 40, 60))
        long = scene.ask(f"long-{scene.came}", 3900, 40)
        while long.num_computed_tokens < 3900:
            keep_asking(scene, "chat", 6, 40, 60)
            scene.turn(4)


def abort_storm(begin: Open) -> None:
    """Sixty clients come every two seconds, and nearly all leave within one; a few are answered."""
    scene = begin(blocks=300, max_num_seqs=16)
    for _ in range(30):
        for _ in range(60):
            scene.ask(f"leaves-{scene.came}", 300, 200)
        live(scene, 1, lambda: keep_asking(scene, "chat", 2, 40, 30))
        abort(scene, living(scene, "leaves")[:-2])
        live(scene, 1, lambda: keep_asking(scene, "chat", 2, 40, 30))


def resets_under_load(begin: Open) -> None:
    """The prefix cache is reset every five seconds, as after a weight update, and running requests start again."""
    scene = begin(blocks=300, max_num_seqs=8)
    for _ in range(16):
        live(scene, 5, lambda: keep_asking(scene, "chat", 8, 400, 200))
        scene.scheduler.reset_prefix_cache(reset_running_requests=True)


def samples_of_one_prompt(begin: Open) -> None:
    """n=8: eight alike answers to one prompt, which end at once, one prompt after the other."""
    scene = begin(blocks=400, max_num_seqs=16)
    for number in range(12):
        for _ in range(8):
            scene.bare.arrive(f"prompt-{number}", [1 + (number + n) % 300 for n in range(500)], 150)
        live(scene, 4)


def low_class_waits_its_turn(begin: Open) -> None:
    """Requests of a high class take all batch slots for 150 s; those of the low class wait, and are served after it."""
    scene = begin(blocks=300, max_num_seqs=4, scheduling_policy="priority")
    for number in range(6):
        scene.ask(f"low-{number}", 600, 50, 5)
    live(scene, 150, lambda: keep_asking(scene, "high", 8, 200, 100))
    live(scene, 30)


def long_pause(begin: Open) -> None:
    """An engine is paused for three minutes with requests running and waiting, as for new weights, and goes on."""
    scene = begin(blocks=140, max_num_seqs=4)
    states = type(scene.scheduler._pause_state)
    for _ in range(2):
        live(scene, 10, lambda: keep_asking(scene, "chat", 8, 200, 200))
        scene.scheduler.set_pause_state(states.PAUSED_ALL)
        scene.idle(180)
        scene.scheduler.set_pause_state(states.UNPAUSED)
    live(scene, 10)


def grammars_take_their_time(begin: Open) -> None:
    """Grammars of many requests take seconds to compile, one after the other, beside plain requests."""
    scene = begin(blocks=300, max_num_seqs=8)
    waiting: list[Future[object]] = []
    for number in range(20):
        waiting.append(Future())
        scene.ask_prepared(with_grammar(waiting[-1]), f"json-{number}", 60, 20)
    for compiled in waiting:
        live(scene, 4, scene.chat)
        compiled.set_result(AnyGrammar())
    live(scene, 5, scene.chat)


def drafts_never_accepted(begin: Open) -> None:
    """Speculative decoding whose drafts were good once and are all rejected from then on."""
    scene = begin(blocks=200, max_num_seqs=8, drafts=4)
    live(scene, 30, lambda: keep_asking(scene, "chat", 8, 100, 300))
    scene.bare._accepted = lambda _drafts: 0  # type: ignore[method-assign]
    live(scene, 60, lambda: keep_asking(scene, "chat", 8, 100, 300))


def burst_into_a_small_pool(begin: Open) -> None:
    """A hundred and fifty requests come at once, and it takes the pool a minute to serve them."""
    scene = begin(blocks=120, max_num_seqs=32)
    rng = scene.bare.rng
    live(scene, 10, scene.chat)
    for _ in range(150):
        scene.ask(f"burst-{scene.came}", rng.randrange(100, 900), rng.randrange(20, 150))
    live(scene, 90)


def slow_fetches(begin: Open) -> None:
    """KV of prompts is fetched from elsewhere in 20 s, each time, and is used."""
    scene = begin(kv_transfer_config=CONNECTOR, blocks=400, max_num_seqs=8)
    fetching, fetched = scene.bare.receiving, scene.scheduler.finished_recving_kv_req_ids

    def load() -> None:
        scene.chat()
        keep_asking(scene, "load", 3, 600, 20)
        for one in living(scene, "load"):
            waits = one.status.name == "WAITING_FOR_REMOTE_KVS"
            if waits and one.request_id not in fetching and one.request_id not in fetched:
                fetching[one.request_id] = scene.bare.steps + 200

    live(scene, 150, load)


def agents_that_grow(begin: Open) -> None:
    """Eight agents whose contexts grow turn by turn, each at its own pace, until the pool is full of them."""
    scene = begin(blocks=500, max_num_seqs=8)
    contexts = [[1 + (31 * agent + n) % 300 for n in range(100)] for agent in range(8)]
    for turn in range(14):
        for agent, context in enumerate(contexts):
            if len(context) < 3500:
                scene.bare.arrive(f"agent-{agent}-{turn}", list(context), 20 + 5 * agent)
                context += [1 + (7 * agent + 13 * turn + n) % 300 for n in range(240)]
            live(scene, 0.8)


def sessions_that_think(begin: Open) -> None:
    """Streaming sessions wait two minutes for each next part, and a pool with room keeps their blocks."""
    scene = begin(blocks=300, max_num_seqs=8)
    names = [scene.bare.arrive(f"session-{number}", scene.bare.tokens(300), 12, part=True) for number in range(4)]
    for _ in range(2):
        live(scene, 120, scene.chat)
        for name in names:
            scene.bare.arrive(name, scene.bare.tokens(40), 12, part=True, whole_name=True)
    for name in names:
        scene.bare.arrive(name, [1], 12, part=False, whole_name=True)
    live(scene, 20, scene.chat)


def aborts_a_step_ahead(begin: Open) -> None:
    """Clients leave all the time, with a step in flight, and a connector sends the blocks of those who stay."""
    scene = begin(kv_transfer_config=CONNECTOR, blocks=200, max_num_seqs=8, a_step_ahead=True)
    rng = scene.bare.rng

    def load() -> None:
        keep_asking(scene, "chat", 10, rng.randrange(50, 600), rng.randrange(5, 80))
        if rng.random() < 0.2:
            abort(scene, [rng.choice(living(scene, "chat"))])
        if not scene.bare.in_flight and scene.scheduler.has_requests():
            scene.bare.schedule()

    live(scene, 100, load)


def one_rank_is_idle(begin: Open) -> None:
    """Of two data-parallel ranks one has no request for a minute, and then one long prompt after the other."""
    clock = VirtualClock()
    ranks = [begin(blocks=140, rank=rank, clock=clock) for rank in (0, 1)]

    def both(seconds: int, one: Callable[[], None], other: Callable[[], None]) -> None:
        for _ in range(round(seconds / PACE_S)):
            one()
            other()
            for scene in ranks:
                scene.turn(PACE_S / 2)

    both(20, ranks[0].chat, ranks[1].chat)
    both(60, ranks[0].chat, lambda: None)
    both(20, lambda: None, lambda: keep_asking(ranks[1], "long", 1, 3900, 20))
    both(10, ranks[0].chat, ranks[1].chat)


def clients_leave_while_fetching(begin: Open) -> None:
    """Clients leave while the KV of their prompts is fetched, which takes 10 s and ends all the same."""
    scene = begin(kv_transfer_config=CONNECTOR, blocks=300, max_num_seqs=8)
    fetching, fetched = scene.bare.receiving, scene.scheduler.finished_recving_kv_req_ids
    rng = scene.bare.rng

    def load() -> None:
        scene.chat()
        keep_asking(scene, "load", 3, 600, 20)
        waiting = [one for one in living(scene, "load") if one.status.name == "WAITING_FOR_REMOTE_KVS"]
        for one in waiting:
            if one.request_id not in fetching and one.request_id not in fetched:
                fetching[one.request_id] = scene.bare.steps + 100
        if waiting and rng.random() < 0.02:
            abort(scene, [rng.choice(waiting)])

    live(scene, 120, load)


def very_slow_steps(begin: Open) -> None:
    """A step takes 12 s, and one that computes a prompt 30 s."""
    scene = begin(blocks=300, max_num_seqs=4)
    for _ in range(40):
        keep_asking(scene, "slow", 4, 700, 8)
        prompts = any(one.num_computed_tokens < one.num_prompt_tokens for one in scene.scheduler.requests.values())
        scene.hang(30 if prompts else 12)


def high_class_preempts_the_low(begin: Open) -> None:
    """Requests of a high class come every 20 s and take the blocks of the low class, which ends later."""
    scene = begin(blocks=100, max_num_seqs=6, scheduling_policy="priority")
    for number in range(3):
        scene.ask(f"low-{number}", 600, 200, 5)
    for _ in range(6):
        live(scene, 10)
        for _ in range(3):
            scene.ask(f"high-{scene.came}", 700, 60, 0)
        live(scene, 10)
    live(scene, 60)


# ---------------------------------------------------------------- faulty


def one_send_never_reported(begin: Open) -> None:
    """A connector reports every send but one."""
    scene = begin(kv_transfer_config=CONNECTOR, blocks=200)
    live(scene, 10, scene.chat)
    scene.ask("keep-0", 400, 2)
    live(scene, 50, scene.chat)


def one_request_passed_over(begin: Open) -> None:
    """A defect of the scheduler passes over one waiting request, though there is room, and serves those behind it."""
    scene = begin(blocks=200, max_num_seqs=8)
    live(scene, 5, scene.chat)
    skipped = scene.ask("skipped", 100, 20)
    for _ in range(600):
        scene.chat()
        scene.scheduler.waiting.remove_request(skipped)
        scene.turn(PACE_S)
        scene.scheduler.waiting.prepend_request(skipped)


def a_block_lost_at_each_abort(begin: Open) -> None:
    """The free of an aborted request forgets its last block."""
    scene = begin(blocks=200, max_num_seqs=8)
    manager = scene.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    for number in range(12):
        scene.ask(f"leaves-{number}", 300, 200)
        live(scene, 2, scene.chat)
        for one in living(scene, "leaves"):
            manager.req_to_blocks[one.request_id].pop()
            abort(scene, [one])
        live(scene, 2, scene.chat)
    live(scene, 20, scene.chat)


def a_step_of_forty_seconds(begin: Open) -> None:
    """The executor holds a step for 40 s, and then goes on as before."""
    scene = begin(blocks=300, max_num_seqs=8)
    live(scene, 20, lambda: keep_asking(scene, "chat", 4, 100, 60))
    keep_asking(scene, "chat", 4, 100, 60)
    scene.hang(40)
    live(scene, 10, lambda: keep_asking(scene, "chat", 4, 100, 60))


def one_fetch_never_ends(begin: Open) -> None:
    """KV is fetched for many requests within a few steps, and for one it never comes."""
    scene = begin(kv_transfer_config=CONNECTOR, blocks=300, max_num_seqs=8)
    live(scene, 20, lambda: keep_asking(scene, "load", 2, 300, 20))
    scene.ask("load-lost", 300, 20)
    for _ in range(800):
        keep_asking(scene, "load-0", 2, 300, 20)
        for one in living(scene, "load-lost"):
            scene.bare.receiving[one.request_id] = scene.bare.steps + 1_000_000
        scene.turn(PACE_S)


def one_grammar_never_compiled(begin: Open) -> None:
    """Grammars compile within a second, but for one."""
    scene = begin(blocks=300, max_num_seqs=8)
    scene.ask_prepared(with_grammar(Future()), "hangs", 60, 20)
    for number in range(50):
        compiled: Future[object] = Future()
        scene.ask_prepared(with_grammar(compiled), f"json-{number}", 60, 20)
        live(scene, 0.5, scene.chat)
        compiled.set_result(AnyGrammar())
        live(scene, 0.5, scene.chat)


def a_preempted_request_forgotten(begin: Open) -> None:
    """A request that is preempted for want of blocks is not put back in the queue, once."""
    scene = begin(blocks=60, max_num_seqs=4)
    kind = type(scene.scheduler)
    preempt = kind._preempt_request
    lost: list[Any] = []

    def forget(scheduler: Any, request: Any, *details: Any, **named: Any) -> None:
        preempt(scheduler, request, *details, **named)
        if not lost:
            lost.append(request)

    kind._preempt_request = forget
    try:
        for _ in range(800):
            keep_asking(scene, "chat", 4, 200, 500)
            scene.turn(PACE_S)
            if lost and lost[0] in scene.scheduler.waiting:
                scene.scheduler.waiting.remove_request(lost[0])
    finally:
        kind._preempt_request = preempt


def tokens_never_given(begin: Open) -> None:
    """A running request is taken for computed to its end in each pass, and so gets no tokens."""
    scene = begin(blocks=300, max_num_seqs=8)
    live(scene, 5, scene.chat)
    starves = scene.ask("starves", 100, 200)
    live(scene, 3, scene.chat)
    _starve(scene, starves, scene.chat)


def tokens_never_given_in_full_steps(begin: Open) -> None:
    """Prompts of later requests take the whole of each step meanwhile: the first of all that run lacks no budget."""
    scene = begin(blocks=900, max_num_seqs=8, max_tokens=64)
    starves = scene.ask("starves", 100, 200)
    live(scene, 5)

    _starve(scene, starves, lambda: keep_asking(scene, "prompt", 3, 1_000, 1))


def _starve(scene: Scene, starves: Any, load: Callable[[], object]) -> None:
    for _ in range(500):
        load()
        computed, starves.num_computed_tokens = starves.num_computed_tokens, starves.num_tokens_with_spec
        scene.bare.schedule()
        scene.write()
        starves.num_computed_tokens = computed
        scene.clock.sleep(PACE_S)
        scene.bare.update()
        scene.write()


# ---------------------------------------------------------------- one prompt, asked again


def scores_of_one_prompt(begin: Open) -> None:
    """Every second request asks for log probabilities of its prompt, so that vLLM reads no prefix for it."""

    def prepare(request: Any) -> None:
        if scene.bare.arrived % 2:
            request.sampling_params.prompt_logprobs = 1
            request.skip_reading_prefix_cache = True

    scene = begin(blocks=600)
    for number in range(12):
        scene.came = 0
        scene.ask_prepared(prepare, f"score-{number}", 400, 4)
        live(scene, 5)


def lookups_that_miss(begin: Open) -> None:
    """Every second lookup of one prompt finds nothing."""
    scene = begin(blocks=600)
    manager = scene.scheduler.kv_cache_manager
    find = manager.get_computed_blocks

    def miss(request: Any) -> Any:
        found = find(request)
        return found if scene.bare.arrived % 2 else (manager.empty_kv_cache_blocks, *(0 for _ in found[1:]))

    manager.get_computed_blocks = miss
    for number in range(12):
        scene.came = 0
        scene.ask(f"{'missed' if scene.bare.arrived % 2 else 'hit'}-{number}", 400, 4)
        live(scene, 5)


UNUSUAL_LOADS: Final = (
    long_chunks_beside_decodes,
    scores_of_one_prompt,
    abort_storm,
    resets_under_load,
    samples_of_one_prompt,
    low_class_waits_its_turn,
    long_pause,
    grammars_take_their_time,
    drafts_never_accepted,
    burst_into_a_small_pool,
    slow_fetches,
    agents_that_grow,
    sessions_that_think,
    aborts_a_step_ahead,
    one_rank_is_idle,
    clients_leave_while_fetching,
    very_slow_steps,
    high_class_preempts_the_low,
)
FAULTS_BESIDE_LOADS: Final = (
    lookups_that_miss,
    one_send_never_reported,
    one_request_passed_over,
    a_block_lost_at_each_abort,
    a_step_of_forty_seconds,
    one_fetch_never_ends,
    one_grammar_never_compiled,
    a_preempted_request_forgotten,
    tokens_never_given,
    tokens_never_given_in_full_steps,
)
