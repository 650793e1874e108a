"""A prefix cache that does not serve, from the event stream; and caches that only do not have what is asked for."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.description import KVGroup
from kvscope.monitor.contract.kinds import Preempt, Release, Status
from kvscope.monitor.detectors.findings import FindingReport, Findings
from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.detectors.registry import THRESHOLDS
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from tests.detectors import waste
from tests.detectors.scenes import Spoken, Watched, value

PREFIX_HITS = "collapse.prefix-hits"
CACHE_FLUSHED = "collapse.cache-flushed"
KV_TOO_SMALL = "sizing.kv-too-small"


def test_lookups_that_miss_what_is_stored() -> None:
    scene = waste.prefix_hits()
    scene.watch.settle()
    finding = scene.only(PREFIX_HITS)
    assert finding.verdict == "confirmed"
    # The first prompt was struck too, and found nothing there that it could have missed.
    _first, *others = scene.lab.faults.on[PREFIX_HITS].affected
    assert finding.culprits.requests == others
    assert value(finding, "cached_blocks_recomputed") == 10 * len(others)
    assert value(finding, "blocks_hit") == 0
    last_at = scene.ledger.at(scene.ledger.prompts[-1].at)
    assert [one.position for one in finding.evidence if one.name == "prompts_computed"] == [last_at]
    lasts_s = scene.watch.settings(THRESHOLDS[f"{PREFIX_HITS}.lasts_s"])
    scene.live(lasts_s - 5)
    assert scene.firing(PREFIX_HITS)
    scene.live(10)
    assert [f.code for f in scene.watch.findings("resolved")] == [PREFIX_HITS]


def test_a_lookup_that_never_hits_is_one_finding_through_pauses_and_a_hit_ends_it() -> None:
    """Between misses come pauses longer than the window, and prompts of which nothing is cached."""
    scene = waste.prefix_hits()
    beginning = list(range(40))
    rng = scene.lab.rng
    for number in range(16):
        scene.live(70, every=2)
        for _ in range(4):
            first = [rng.randrange(1000, 9000) for _ in beginning] if number % 2 else beginning
            scene.lab.arrive([*first, rng.randrange(1000)], max_tokens=2)
            scene.run_until_idle()
    assert scene.firing(PREFIX_HITS)
    assert scene.watch.findings("resolved") == []
    fault = scene.lab.faults.on[PREFIX_HITS]
    fault.limit = fault.triggers
    scene.live(70, every=2)
    for _ in range(2):
        scene.lab.arrive([*beginning, 1], max_tokens=2)
        scene.run_until_idle()
    scene.live(5)
    assert not scene.firing(PREFIX_HITS)


def test_the_last_block_of_a_prompt_is_always_computed_and_is_no_miss() -> None:
    scene = Watched(total=201)
    prompt = list(range(40))
    for _ in range(12):
        scene.lab.arrive(prompt, max_tokens=1)
        scene.run_until_idle()
    assert [computed.again for computed in scene.ledger.prompts] == [0] + 11 * [1]
    scene.watch.settle()
    assert scene.alarms() == []


@pytest.mark.parametrize(("small_since_ns", "fires"), [(30, [PREFIX_HITS]), (10, [PREFIX_HITS, KV_TOO_SMALL])])
def test_recomputed_preemptions_after_misses_are_their_effect_and_those_before_are_not(
    small_since_ns: int, fires: list[str]
) -> None:
    findings = Findings()
    missed = Judgement(code=PREFIX_HITS, engine="e", verdict="confirmed", since_ns=20, explanation="")
    small = Judgement(code=KV_TOO_SMALL, engine="e", verdict="confirmed", since_ns=small_since_ns, explanation="")
    findings.update("e", 40, [small, missed])
    assert sorted(each.judgement.code for each in findings.firing()) == fires


@pytest.mark.parametrize(
    ("affected", "fresh", "verdicts"),
    [(4, 0, ["confirmed"]), (3, 0, []), (4, 2, ["confirmed"]), (4, 3, ["likely"]), (3, 3, [])],
)
def test_three_prompts_are_missed_at_least_and_half_of_what_is_computed_or_all(
    affected: int, fresh: int, verdicts: list[str]
) -> None:
    """The first of those struck has nothing to miss. Each other misses ten blocks, and each prompt computes ten."""
    scene = Watched(total=201, faults=[PREFIX_HITS])
    shared = list(range(40))
    for number in range(fresh + affected):
        prompt = shared if number >= fresh else [scene.lab.rng.randrange(1000, 9000) for _ in shared]
        scene.lab.arrive([*prompt, scene.lab.rng.randrange(1000)], max_tokens=1)
        scene.run_until_idle()
    scene.watch.settle()
    assert [finding.verdict for finding in scene.firing(PREFIX_HITS)] == verdicts


def missed_beside(*, hits: int, groups: int = 1, lost: int = 0) -> Spoken:
    """Four prompts compute what is cached, beside six of their own and `hits` that hit, of ten blocks each. What is
    sent about prompt `lost` is lost for good.
    """
    scene = Spoken(total=401, groups=[KVGroup("full")] * groups)
    for number in range(1, 11 + hits):
        blocks = list(range(10 * number, 10 * number + 10))
        hit = 40 if number <= hits else 0
        scene.log.arrived(number, f"r-{number}", 41, 8, 0, 10, 12)
        scene.log.allocated(number, blocks)
        scene.log.looked_up(number, 41, hit)
        scene.log.admitted(number, hit)
        if not hit and number <= hits + 6:
            scene.log.cached(number, blocks, [1000 + block for block in blocks])
        scene.log.first_token(number)
        if number == lost:
            scene.log.flush(-1, -1, (-1, -1, -1, -1))
            list(scene.packer.pack())
        scene.wait(0.1)
    return scene


def test_a_cache_that_never_hits_is_likely_the_cause_of_what_it_missed() -> None:
    (finding,) = missed_beside(hits=0).firing(PREFIX_HITS)
    assert finding.verdict == "likely"
    assert value(finding, "cached_share_recomputed") == 40.0
    assert "prompt_logprobs" in finding.missing


def test_a_cache_that_hits_others_may_miss_a_part() -> None:
    """The engine reports no lookup of a prompt that asks for none."""
    (finding,) = missed_beside(hits=1).firing(PREFIX_HITS)
    assert finding.verdict == "likely"
    assert value(finding, "cached_blocks_recomputed") == 40
    assert "prompt_logprobs" in finding.missing


@pytest.mark.parametrize("hits", [0, 1])
def test_one_of_several_groups_may_miss_a_part(hits: int) -> None:
    """A window that the group left behind vetoes a hit."""
    assert not missed_beside(hits=hits, groups=2).firing(PREFIX_HITS)


@pytest.mark.parametrize(
    ("entered", "verdicts", "recomputed"),
    [(0, ["confirmed"], 40), (3, ["likely"], 28), (10, [], 0)],
)
def test_what_one_group_lacks_the_others_cannot_hit(entered: int, verdicts: list[str], recomputed: int) -> None:
    """Of ten blocks that the first group holds, `entered` enter the cache in the second: it lacked them."""
    scene = Spoken(total=401, groups=[KVGroup("full"), KVGroup("sliding_window", window=64)])
    for number in range(1, 5):
        blocks, others = list(range(10 * number, 10 * number + 10)), list(range(200 + 10 * number, 210 + 10 * number))
        scene.log.arrived(number, f"r-{number}", 41, 8, 0, 20, 24)
        scene.log.allocated(number, blocks)
        scene.log.allocated(number, others, group=1)
        scene.log.looked_up(number, 41, 40)
        scene.log.looked_up(number, 41, 0, 1)
        scene.log.admitted(number, 0)
        scene.log.cached(number, others[:entered], [1000 + block for block in others[:entered]], 1)
        scene.log.first_token(number)
        scene.wait(0.1)
    found = scene.firing(PREFIX_HITS)
    assert [finding.verdict for finding in found] == verdicts
    assert [value(finding, "cached_blocks_recomputed") for finding in found] == [recomputed][: len(found)]
    assert ["group" in finding.missing for finding in found] == [verdict == "likely" for verdict in verdicts]


def test_misses_are_over_once_more_prompts_hit_than_between_two() -> None:
    """Every second lookup of a prefix misses it, a minute apart. Then all hit."""
    scene = Watched(total=201, faults=[f"{PREFIX_HITS}:every=2"])
    fault = scene.lab.faults.on[PREFIX_HITS]

    def ask() -> None:
        scene.lab.arrive([*range(40), scene.lab.rng.randrange(1000), *range(60)], max_tokens=1)
        scene.run_until_idle()
        scene.live(65)

    for _ in range(8):
        ask()
    assert [prompt.missed for prompt in scene.ledger.prompts] == [0, 0, 10, 0, 10, 0, 10, 0]
    assert [finding.verdict for finding in scene.firing(PREFIX_HITS)] == ["likely"]
    fault.limit = fault.triggers
    ask()
    assert not scene.firing(PREFIX_HITS)


@pytest.mark.parametrize(("lost", "recomputed"), [(1, 40), (8, 30)])
def test_prompts_that_missed_count_before_and_after_a_loss(lost: int, recomputed: int) -> None:
    """The last four have missed, whatever the prompts did whose events are lost."""
    scene = missed_beside(hits=0, lost=lost)
    assert scene.ledger.losses
    (finding,) = scene.firing(PREFIX_HITS)
    assert finding.verdict == "likely"
    assert value(finding, "cached_blocks_recomputed") == recomputed


def duplicated(
    *, prompts: int = 8, concurrent: bool = False, evicted: bool = False, window: int = 0, blocks: int = 10
) -> Spoken:
    """An engine that enters every full block in its cache, as vLLM does, computes one prefix of `blocks` each time, of
    prompts that hold as many again of their own.

    concurrent: all are admitted before the first is computed. evicted: what held the prefix is allocated meanwhile.
    """
    scene = Spoken(total=401, groups=[KVGroup("FullAttentionSpec", window=window)])

    def admit(number: int) -> list[int]:
        own = list(range(20 * number, 20 * number + 2 * blocks))
        scene.log.arrived(number, f"r-{number}", 8 * blocks + 1, 8, 0, 2 * blocks, 2 * blocks + 2)
        scene.log.allocated(number, own)
        scene.log.looked_up(number, 8 * blocks + 1, 0)
        scene.log.admitted(number, 0)
        scene.wait(0.1)
        return own

    def compute(number: int, own: list[int]) -> None:
        scene.log.cached(number, own, [*range(1000, 1000 + blocks), *(2000 + each for each in own[blocks:])])
        scene.log.first_token(number)
        scene.wait(0.1)
        scene.log.finished(number, Status.FINISHED_STOPPED)
        scene.log.released(number, own, Release.FINISHED)
        if evicted:
            scene.log.arrived(100 + number, f"e-{number}", 8, 8, 0, 2, 2)
            scene.log.allocated(100 + number, own, [*range(1000, 1000 + blocks)])
        scene.wait(0.1)

    numbers = range(1, 1 + prompts)
    if concurrent:
        for number, own in [(number, admit(number)) for number in numbers]:
            compute(number, own)
    else:
        for number in numbers:
            compute(number, admit(number))
    return scene


def test_a_prefix_in_several_blocks_was_computed_though_it_was_cached() -> None:
    scene = duplicated()
    assert [prompt.kept for prompt in scene.ledger.prompts] == [0] + 7 * [10]
    (finding,) = scene.firing(PREFIX_HITS)
    assert finding.verdict == "likely"
    assert value(finding, "cached_blocks_recomputed") == 7 * 9
    assert "prompt_logprobs" in finding.missing


@pytest.mark.parametrize(
    "load",
    [{"concurrent": True}, {"evicted": True}, {"window": 64}, {"blocks": 2}, {"prompts": 3}],
    ids=["computed side by side", "evicted since", "a window", "what is always computed", "too few"],
)
def test_blocks_of_one_content_that_no_lookup_missed(load: dict[str, int]) -> None:
    assert not duplicated(**load).firing(PREFIX_HITS)  # type: ignore[arg-type]


def _admitted_without_a_hit(scene: Spoken, number: int) -> list[int]:
    """A prompt of ten blocks and a token, of which the lookup finds none. Return its blocks."""
    blocks = list(range(10 * number, 10 * number + 10))
    scene.log.arrived(number, f"r-{number}", 41, 8, 0, 10, 12)
    scene.log.allocated(number, blocks)
    scene.log.looked_up(number, 41, 0)
    scene.log.admitted(number, 0)
    return blocks


@pytest.mark.parametrize("gap", [0, 1])
def test_behind_a_block_that_the_cache_lacked_nothing_could_be_hit(gap: int) -> None:
    """The first of these prompts' blocks was evicted, so that each computed all ten, though nine were cached."""
    scene = Spoken(total=401)
    for number in range(1, 5):
        blocks = _admitted_without_a_hit(scene, number)
        if gap:
            scene.log.cached(number, blocks[:1], [1000 + number])
        scene.log.first_token(number)
        scene.wait(0.1)
    assert bool(scene.firing(PREFIX_HITS)) == (not gap)


@pytest.mark.parametrize("preempted", [0, 2])
def test_a_first_token_after_the_preemption_of_its_request_shows_no_miss(preempted: int) -> None:
    """Where steps overlap, a request may be preempted before the output of its last step is there, and its blocks do
    not enter the cache. Two more that missed theirs are too few.
    """
    scene = Spoken(total=401)
    for number in range(1, 5):
        _admitted_without_a_hit(scene, number)
        if number <= preempted:
            scene.log.preempted(number, Preempt.KV_BLOCKS, -1, 10, 41)
        scene.log.first_token(number)
        scene.wait(0.1)
    assert bool(scene.firing(PREFIX_HITS)) == (not preempted)


def test_a_prompt_whose_last_block_alone_is_computed_again_is_none_of_those_missed() -> None:
    """Two that miss ten blocks each are too few, and this one is no third."""
    scene = Watched(total=201, faults=[f"{PREFIX_HITS}:limit=3"])
    shared = list(range(40))
    for number in range(3):
        scene.lab.arrive([*shared, 1000 + number], max_tokens=1)
        scene.run_until_idle()
    scene.lab.arrive(shared, max_tokens=1)
    scene.run_until_idle()
    scene.watch.settle()
    assert [prompt.again for prompt in scene.ledger.prompts] == [0, 10, 10, 1]
    assert not scene.firing(PREFIX_HITS)


@pytest.mark.parametrize("shared", [True, False])
def test_sound_lookups_and_prompts_that_share_nothing(shared: bool) -> None:
    """Without the fault prefixes are hit. With it and nothing shared, hits are 0 all the same, and nothing is wrong."""
    scene = waste.prefix_hits(fault=not shared, shared=shared)
    assert (scene.ledger.state.totals.hit_tokens > 0) == shared
    scene.watch.settle()
    assert scene.alarms() == []


def test_an_engine_may_say_what_it_cached_before_it_says_whom_it_let_in() -> None:
    """vLLM caches a chunk's blocks as it gives them out, and who runs is known when the whole step is planned."""
    scene = Spoken(total=401)
    for number in range(1, 31):
        blocks = list(range(10 * number, 10 * number + 10))
        scene.log.arrived(number, f"r-{number}", 40, 8, 0, 10, 12)
        scene.log.allocated(number, blocks)
        scene.log.cached(number, blocks, [1000 + block for block in blocks])
        scene.log.looked_up(number, 40, 0)
        scene.log.admitted(number, 0)
        scene.log.first_token(number)
        scene.wait(0.1)
    assert {prompt.again for prompt in scene.ledger.prompts} == {0}
    assert scene.alarms() == []


def test_alike_prompts_that_come_at_once_are_computed_side_by_side() -> None:
    scene = Watched(total=601, max_num_batched_tokens=400, max_num_seqs=8)
    for _ in range(8):
        prompt = [scene.lab.rng.randrange(1000) for _ in range(40)]
        for _ in range(8):
            scene.lab.arrive(prompt, max_tokens=2)
        scene.run_until_idle()
    assert scene.ledger.state.totals.hit_tokens < 8 * 8 * 40 / 2
    scene.watch.settle()
    assert scene.alarms() == []


def test_a_loss_makes_nothing_of_prompts_that_are_being_computed() -> None:
    scene = Watched(total=201, max_num_batched_tokens=16)
    for _ in range(10):
        scene.lab.arrive(100, max_tokens=2)
        scene.steps(2)
        scene.lab.step()
        scene.skip()
        scene.run_until_idle()
    scene.watch.settle()
    assert scene.ledger.losses
    assert scene.alarms() == []


def test_a_keyframe_has_what_was_cached_of_prompts_so_far() -> None:
    """Who joins while a prompt is computed comes to the same end as who listened from the start."""
    scene = Watched(total=201, max_num_batched_tokens=16)
    scene.lab.arrive(100, max_tokens=2)
    scene.steps(3)
    late = EngineLedger(scene.ledger.engine)
    late.apply(scene.lab.keyframe())
    seen = len(scene.lab.frames)
    scene.run_until_idle()
    for frame in scene.lab.frames[seen:]:
        late.apply(frame)
    assert list(late.prompts) == list(scene.ledger.prompts) != []


def test_one_prompt_that_pushes_out_what_is_needed() -> None:
    scene = waste.flushed_by_one()
    scene.watch.settle()
    finding = scene.only(CACHE_FLUSHED)
    assert finding.verdict == "confirmed"
    assert finding.culprits.requests == ["the-huge-one"]
    assert value(finding, "blocks_evicted_by_prompt") == value(finding, "evicted_blocks_recomputed")
    scene.live(scene.watch.settings(THRESHOLDS[f"{CACHE_FLUSHED}.remember_s"]) + 5, every=2.0)
    assert [f.code for f in scene.watch.findings("resolved")] == [CACHE_FLUSHED]


@pytest.mark.parametrize(
    ("threshold", "figures"),
    [
        ("min_share", ("blocks_evicted_by_prompt", "blocks_cached_idle_before")),
        ("min_missed", ("evicted_blocks_recomputed", "blocks_evicted_by_prompt")),
        ("min_blocks", ("evicted_blocks_recomputed", "")),
        ("min_cache", ("blocks_cached_idle_before", "usable")),
    ],
)
def test_a_flush_at_a_threshold_counts_and_one_below_it_does_not(threshold: str, figures: tuple[str, str]) -> None:
    """Without the rule of prompts much larger than the load's, which asks for other shares."""
    one_rule = f"{CACHE_FLUSHED}.min_times_larger=1000"
    (finding,) = flushed(one_rule)
    known = {one.name: float(one.value) for one in finding.evidence if isinstance(one.value, int)}
    known |= {"usable": 120.0, "": 1.0}
    at = known[figures[0]] / known[figures[1]]
    assert flushed(one_rule, f"{CACHE_FLUSHED}.{threshold}={at}")
    assert not flushed(one_rule, f"{CACHE_FLUSHED}.{threshold}={1.01 * at}")


def flushed(*settings: str) -> list[FindingReport]:
    scene = waste.flushed_by_one(settings)
    scene.watch.settle()
    return scene.firing(CACHE_FLUSHED)


def test_what_is_pushed_out_and_never_asked_for_again_is_no_loss() -> None:
    scene = waste.flushed_by_one(needed_again=False)
    assert scene.ledger.state.totals.evicted > 0
    scene.watch.settle()
    assert scene.alarms() == []


def test_a_cache_too_small_for_what_is_shared_is_no_flush() -> None:
    """Prompts in turn, more than fit: each evicts the next one's, as an LRU must, and nobody evicts most of it."""
    scene = Watched(total=81)
    prompts = [[1000 * n + token for token in range(41)] for n in range(10)]
    for prompt in prompts * 4:
        scene.lab.arrive(prompt, max_tokens=1)
        scene.run_until_idle()
    evictions = scene.ledger.state.evictions
    assert evictions is not None
    assert sum(one.missed for one in evictions.culprits) > 0
    scene.watch.settle()
    assert scene.alarms() == []


def test_prefixes_that_go_while_there_is_room() -> None:
    scene = waste.flushed_needlessly()
    scene.watch.settle()
    finding = scene.only(CACHE_FLUSHED)
    assert finding.verdict == "confirmed"
    # Between two of those who share it, somebody else; the last one's eviction was not needed again.
    assert finding.culprits.requests == [f"r-{number}" for number in range(2, 20, 2)]
    assert value(finding, "evicted_blocks_recomputed") == 9 * 10


def test_without_the_fault_the_same_prompts_are_hit() -> None:
    scene = waste.flushed_needlessly(fault=False)
    scene.watch.settle()
    assert scene.alarms() == []
    assert scene.ledger.state.totals.hit_tokens == 9 * 40
