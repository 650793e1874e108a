"""Requests, what never came back, the prefix cache, the memory: the views say what the query interface answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvscope.dashboards.web import header
from kvscope.dashboards.web.links import place_of, wall_ns
from kvscope.dashboards.web.view import Here, PageView
from kvscope.dashboards.web.views import (
    findings_view,
    memory_view,
    overview_view,
    planner_view,
    prefix_cache_view,
    request_view,
    requests_view,
    retained_blocks_view,
)
from kvscope.lab.recorded_pages import rows as page_rows
from kvscope.lab.recorded_pages import scraped
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base.text import counted, duration, in_words
from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.questions.pipeline import Pipeline
from tests.detectors.scenes import Watched
from tests.web.parts import ENGINE


def looked_at(lab: Lab) -> Pipeline:
    lab.flush()
    watch = Pipeline()
    watch.feed(lab.frames)
    watch.settle()
    return watch


def at(watch: Pipeline, address: str) -> Here:
    engines = watch.engines()
    (engine,) = engines
    assert engine.at is not None
    place = place_of(address)._replace(engine=engine.engine)
    return Here(place, place.window(wall_ns(engine.at, 0)), engine, engines)


def texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, (list, tuple)):
        for one in tree:
            yield from texts(one)
    elif hasattr(tree, "children"):
        yield from texts(tree.children)
    elif tree is not None:
        yield str(tree)


def text(view: PageView, section: str) -> str:
    return re.sub(r"\s+", " ", " ".join(texts(view.sections[section])))


def rows(view: PageView, section: str) -> list[list[str]]:
    """The cells of each row of its tables."""

    def walk(tree: Any) -> Iterator[Any]:
        for one in tree if isinstance(tree, (list, tuple)) else [tree]:
            if type(one).__name__ == "Tr":
                yield [" ".join(texts(cell)).strip() for cell in one.children]
            elif hasattr(one, "children"):
                yield from walk(one.children)

    return list(walk(view.sections[section]))


def test_what_a_leak_keeps_is_named_and_what_came_back_is_not() -> None:
    lab = Lab(faults=["leak.unaccounted:every=2"])
    for number in range(6):
        request = lab.arrive(20 + number, name=f"r-{number}")
        lab.step()
        lab.abort(request)
        for _ in range(3):
            lab.step(0.5)
            lab.heartbeat()
    watch = looked_at(lab)
    reported = watch.retained_blocks(ENGINE)
    view = retained_blocks_view.view(watch, at(watch, "/held"))
    assert reported.held_blocks
    assert text(view, "head").startswith(counted(reported.held_blocks, "block"))
    named = [(row[0], row[2], row[5]) for row in rows(view, "held")[1:]]
    assert named == [(one.owner or "no known owner", one.reason, f"{one.blocks:,}") for one in reported.held]
    assert reported.floors[-1].blocks == reported.held_blocks
    assert f"It rose from {reported.floors[0].blocks:,} to {reported.floors[-1].blocks:,}" in text(view, "floors")


def test_nothing_is_named_where_all_came_back() -> None:
    lab = Lab()
    lab.arrive(20)
    lab.run_until_idle()
    watch = looked_at(lab)
    view = retained_blocks_view.view(watch, at(watch, "/held"))
    assert "No block is held now" in text(view, "head")
    assert "No request holds any" in text(view, "held")
    assert "It does not rise" in text(view, "floors")
    stayed = [int(row[1].replace(",", "")) for row in rows(view, "lifetimes")]
    assert sum(stayed) == watch.retained_blocks(ENGINE).freed


def test_a_prefix_stands_above_what_goes_on_from_it_with_all_who_have_it() -> None:
    lab = Lab()
    beginning = list(range(1, 17))
    lab.arrive([*beginning, *range(100, 120)], max_tokens=50, name="one")
    for _ in range(4):
        lab.step()
    lab.arrive([*beginning, *range(200, 220)], max_tokens=50, name="two")
    for _ in range(4):
        lab.step()
    watch = looked_at(lab)
    view = prefix_cache_view.view(watch, at(watch, "/prefixes"))
    first, *others = rows(view, "tree")[1:]
    assert {"one", "two"} <= set(first[7].split())
    assert (first[2], first[3]) == (f"{len(beginning)}", "2")
    assert [sorted(row[7].split()) for row in others] in ([["one"], ["two"]], [["two"], ["one"]])


def test_who_evicted_what_is_needed_again_is_named() -> None:
    lab = Lab(total=17)
    prompt = list(range(1, 29))
    for name, tokens in (("first", prompt), ("flood", list(range(100, 156))), ("again", prompt)):
        lab.arrive(tokens, max_tokens=4, name=name)
        lab.run_until_idle()
    watch = looked_at(lab)
    evicted = rows(prefix_cache_view.view(watch, at(watch, "/prefixes")), "evictions")[1:]
    needed = {row[1]: row[3] for row in evicted if row[3] != "none"}
    assert needed
    assert set(needed) == {"flood"}


def test_the_calculator_answers_by_the_address_and_says_what_it_cannot_read() -> None:
    lab = Lab()
    lab.arrive(20)
    lab.run_until_idle()
    watch = looked_at(lab)
    for asked in ((20, 10, 2), (200, 50, 3)):
        reported = watch.calculator(ENGINE, *asked)
        address = "/memory?prompt_tokens={}&max_tokens={}&concurrency={}".format(*asked)
        answer = text(memory_view.view(watch, at(watch, address)), "calculator")
        assert f"At most {reported.max_concurrency:,} fit at once" in answer
        assert ("do not fit" in answer) == (not reported.fits)
        assert f"{reported.blocks_needed:,}" in answer
    wrong = text(memory_view.view(watch, at(watch, "/memory?prompt_tokens=many")), "calculator")
    assert "Each is a whole number, 1 or more." in wrong


def test_the_planner_shows_what_the_plan_computes_and_names_bad_input_at_its_field() -> None:
    lab = Lab()
    lab.arrive(20)
    lab.run_until_idle()
    watch = looked_at(lab)
    plan = watch.plan(ENGINE, prompt_len=40, output_len=10)
    view = planner_view.view(watch, at(watch, "/plan?prompt_len=40&output_len=10"))
    assert f"{plan.requests_at_once:,} requests of 50 tokens fit at once" in text(view, "plan")
    assert [row[0] for row in rows(view, "lengths")] == [f"{one.tokens:,} tokens" for one in plan.requests_by_length]
    assert all(one.flag in text(view, "settings") for one in plan.settings)
    assert "prompt length 40 tokens given" in " ".join(text(view, "inputs").split())
    other = planner_view.view(watch, at(watch, "/plan?model=gpt2&kv_cache_memory=4"))
    assert f"{(4 << 30) // (36_864 * 16):,} blocks" in text(other, "plan")
    for address, sentence in (
        ("/plan?layers=x", "Layers is a whole number, not 'x'."),
        ("/plan?model=novel", "The plan does not know the model novel"),
        ("/plan?model=gpt2&device_memory=-1", "Device is a size in GiB, 0 or more, not '-1'."),
        ("/plan?model=gpt2&device_memory=16&gpu_memory_utilization=3", "--gpu-memory-utilization is a share above 0"),
    ):
        wrong = planner_view.view(watch, at(watch, address))
        assert sentence in text(wrong, "form")
        assert "plan" not in wrong.sections


def test_a_plain_vllm_is_planned_by_its_metrics() -> None:
    watch = Pipeline()
    watch.feed(scraped(page_rows("healthy-shared-prefix")))
    (engine,) = (view.engine for view in watch.engines())
    plan = watch.plan(engine)
    assert (plan.blocks, plan.block_size) == (513, 32)
    assert {one.name for one in plan.inputs if one.origin == "measured"} >= {"concurrency", "blocks", "block size"}
    assert watch.calculator(engine, 100, 28, 3).blocks_per_request == 4


def test_a_bill_that_was_never_said_is_not_made_up() -> None:
    lab = Lab()
    lab.arrive(20)
    lab.run_until_idle()
    watch = looked_at(lab)
    assert "the memory of the device needs" in text(memory_view.view(watch, at(watch, "/memory")), "breakdown")


def test_the_parts_of_the_bill_are_a_waterfall_to_the_total() -> None:
    lab = Lab()
    figures = [1000, 400, 500, 100, 100, 50, -1, -1, 50, 300, -1, -1, 260, -1]
    lab.log.memory([figure << 20 if figure > 0 else figure for figure in figures])
    lab.arrive(20)
    lab.run_until_idle()
    watch = looked_at(lab)
    view = memory_view.view(watch, at(watch, "/memory"))
    parts = watch.memory(ENGINE).parts
    assert [row[0] for row in rows(view, "breakdown")] == [name for name, size in parts.items() if size]
    assert sum(parts.values()) == watch.memory(ENGINE).measured["device_total"]
    assert f"--kv-cache-memory-bytes {260 << 20}" in text(view, "breakdown")


def waiting() -> Pipeline:
    """One runs, one has no room beside it, one stands behind that, and two have ended."""
    lab = Lab(total=20, max_num_batched_tokens=80, prefix_caching=False)
    for name in ("done-1", "done-2"):
        lab.arrive(8, max_tokens=1, name=name)
        lab.run_until_idle()
    for name in ("large", "next", "last"):
        lab.arrive(60, max_tokens=4 if name != "large" else 12, name=name)
    for _ in range(3):
        lab.step()
    return looked_at(lab)


def test_requests_are_narrowed_and_sorted_by_the_address() -> None:
    watch = waiting()
    reported = {one.id: one for one in watch.requests(ENGINE)}

    def shown(asked: str) -> list[str]:
        return [row[0] for row in rows(requests_view.view(watch, at(watch, f"/requests?{asked}")), "requests")[1:]]

    assert set(shown("")) == set(reported)
    assert shown("q=DONE&sort=id") == sorted(name for name in reported if "done" in name)
    assert set(shown("state=WAITING")) == {name for name, one in reported.items() if one.state == "WAITING"} != set()
    assert shown("reason=BEHIND_HEAD") == [name for name, one in reported.items() if one.reason == "BEHIND_HEAD"] != []
    assert set(shown("holding=1")) == {name for name, one in reported.items() if one.blocks} != set()
    by_blocks = [reported[name].blocks for name in shown("sort=-blocks")]
    assert by_blocks == sorted(by_blocks, reverse=True)
    by_wait = [sum(reported[name].waited_s.values()) for name in shown("sort=waited")]
    assert by_wait == sorted(by_wait)
    assert shown("q=nobody") == []


def test_many_requests_are_turned_over_by_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = waiting()
    monkeypatch.setattr(requests_view, "A_PAGE", 2)
    seen = []
    for number in (1, 2, 3):
        view = requests_view.view(watch, at(watch, f"/requests?sort=id&page={number}"))
        seen += [row[0] for row in rows(view, "requests")[1:]]
        assert f"page {number} of 3" in text(view, "requests")
    assert seen == sorted(one.id for one in watch.requests(ENGINE))


def test_who_waits_is_led_to_the_root() -> None:
    watch = waiting()
    view = request_view.view(watch, at(watch, "/request?id=last"))
    reported = watch.request(ENGINE, "last")
    tree = text(view, "waits")
    places = [tree.index(f"request {name}") for name in ("last", "next", "large")]
    assert places == sorted(places)
    assert [row[0] for row in rows(view, "life")[1:]] == [in_words(phase.state) for phase in reported.phases]
    assert [row[1] for row in rows(view, "conditions")] == ["yes" if one.holds else "no" for one in reported.conditions]
    assert reported.waits is not None
    assert (reported.waits.request, reported.waits.waits_for[0].request) == ("last", "next")


def test_what_was_computed_again_is_hatched() -> None:
    lab = Lab(total=14, max_num_batched_tokens=80, prefix_caching=False)
    for name in ("one", "two"):
        lab.arrive(16, max_tokens=20, name=name)
    lab.run_until_idle()
    watch = looked_at(lab)
    (again,) = {one.id for one in watch.requests(ENGINE) if one.preemptions}
    life = watch.request(ENGINE, again).phases
    view = request_view.view(watch, at(watch, f"/request?id={again}"))
    assert "Hatched" in text(view, "life")
    computed = [row[5] for row in rows(view, "life")[1:]]
    assert [f"({phase.recomputed_tokens:,} again)" in cell for phase, cell in zip(life, computed, strict=True)] == [
        bool(phase.recomputed_tokens) for phase in life
    ]


def test_how_long_ago_a_request_has_ended_is_no_part_of_its_life() -> None:
    lab = Lab()
    lab.arrive(20, name="one")
    lab.run_until_idle()
    lab.step(1000.0)
    lab.step()
    lab.heartbeat()
    watch = looked_at(lab)
    detail = watch.request(ENGINE, "one")
    life = text(request_view.view(watch, at(watch, "/request?id=one")), "life")
    ended = detail.phases[-1]
    assert ended.state.startswith("FINISHED")
    assert ended.for_s >= 1000
    assert f"Phases {duration(sum(phase.for_s for phase in detail.phases[:-1]))} from" in life
    assert duration(ended.for_s) in life


def test_where_no_request_matches_there_is_a_sentence_and_no_table() -> None:
    watch = waiting()
    view = requests_view.view(watch, at(watch, "/requests?q=nobody"))
    assert f"None of {counted(len(watch.requests(ENGINE)), 'request')} matches" in text(view, "requests")
    assert not rows(view, "requests")


def test_the_pool_inside_the_memory_is_as_it_was_then() -> None:
    watch = waiting()
    first = watch.history(ENGINE).first
    assert first is not None
    (then,) = watch.engines(first)
    (now,) = watch.engines()
    assert then.balance is not None
    assert now.balance is not None
    assert then.balance.free != now.balance.free
    reported = text(memory_view.view(watch, at(watch, f"/memory?at={first}")), "pool")
    assert f"free {then.balance.free:,} " in reported


def test_of_many_findings_the_first_are_shown_in_full_and_none_is_lost() -> None:
    lab = Lab(total=20)
    lab.arrive(20 * 4 + 1)
    for _ in range(10):
        lab.step(1.0)
        lab.heartbeat()
    watch = looked_at(lab)
    (judged,) = [one.judgement for one, to, _ in watch.take_transitions() if to == "firing"]
    ledger = watch.fleet.engines[judged.engine]
    alike = [msgspec.structs.replace(judged, key=str(n)) for n in range(2 * findings_view.FULL_CARDS)]
    watch.lifecycle.update(judged.engine, ledger.now_ns, alike)
    grave = [one for one in watch.findings("firing") if one.severity != "info"]
    assert len(grave) > max(overview_view.MOST_NAMED, findings_view.FULL_CARDS)
    row = text(overview_view.view(watch, at(watch, "/")), "engines")
    assert f"and {len(grave) - overview_view.MOST_NAMED} more" in row
    view = findings_view.view(watch, at(watch, "/findings"))
    kinds = [type(one).__name__ for one in view.sections["findings"].children]
    assert kinds.count("Article") == findings_view.FULL_CARDS
    assert kinds.count("Article") + kinds.count("Details") >= len(grave)


def test_findings_for_information_share_a_row_and_others_do_not() -> None:
    lab = Lab()
    lab.arrive(12)
    lab.run_until_idle()
    watch = looked_at(lab)
    for code in ("held.prefix-cache", "collapse.prefix-hits"):
        for at_s in (100, 900, 1700):
            judged = Judgement(code=code, engine=ENGINE, verdict="confirmed", explanation="it is so")
            watch.lifecycle.update(ENGINE, watch.fleet.engines[ENGINE].now_ns + at_s * 10**9, [judged])
            watch.lifecycle.update(ENGINE, watch.fleet.engines[ENGINE].now_ns + (at_s + 400) * 10**9, [])
    titles = [row[0] for row in rows(findings_view.view(watch, at(watch, "/findings")), "finding-timeline")[1:]]
    assert {titles.count(title) for title in titles} == {1, 3}
    (alike,) = [
        row
        for row in rows(findings_view.view(watch, at(watch, "/findings")), "finding-timeline")
        if "3 times" in row[2]
    ]
    assert titles.count(alike[0]) == 1


def test_a_moment_of_an_engine_that_has_gone_is_not_called_its_end() -> None:
    lab = Lab()
    lab.arrive(12)
    lab.run_until_idle()
    watch = looked_at(lab)
    (live,) = watch.engines()
    engine = msgspec.structs.replace(live, status="stopped")
    here = at(watch, "/blocks")._replace(engine=engine, engines=[engine])
    (end,) = texts(header.alarms(here, ""))
    assert end == "This engine has stopped. This page shows it when it was last received."
    chosen = here._replace(place=here.place._replace(at=live.at or ""))
    (moment,) = texts(header.alarms(chosen, ""))
    assert moment == "This engine has stopped. This page shows it at the moment that you chose."


def test_the_headline_of_a_stuck_engine_names_what_holds_it_up() -> None:
    """And not a leak that has been open for longer."""
    scene = Watched(total=65, faults=("leak.unaccounted", "stuck.never-fits"))
    for _ in range(4):
        request = scene.lab.arrive(14, max_tokens=20)
        scene.steps(4, 2.0)
        scene.lab.abort(request)
        scene.live(60.0, 2.0)
    before = text(overview_view.view(scene.watch, at(scene.watch, "/")), "head")
    scene.lab.arrive(400, max_tokens=4)
    scene.lab.arrive(8, max_tokens=4)
    scene.live(60.0, 1.0)
    found = {finding.code for finding in scene.watch.findings("firing")}
    assert found >= {"leak.unaccounted", "stuck.never-fits"}
    headline = text(overview_view.view(scene.watch, at(scene.watch, "/")), "head")
    titles = {finding.code: finding.title for finding in scene.watch.findings("firing")}
    assert titles["leak.unaccounted"][1:] in before
    assert re.search(r"has computed no token since \S+ UTC with 2 unfinished requests: ", headline)
    assert titles["stuck.never-fits"][1:] in headline
