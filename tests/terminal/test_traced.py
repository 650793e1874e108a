"""Each number that a person is told of six incidents is in the JSON of the same command, and the events bear it out.

What the events come to is counted here once more, by the plainest fold (plain.py beside this file), up to the position
that an item of evidence has, or the moment that is told of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec
import pytest

from kvscope.monitor.base.text import duration, percent
from kvscope.monitor.contract.kinds import Kind, Status
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.recording import Recording
from kvscope.monitor.terminal.explain_text import event_at
from tests.terminal import golden
from tests.terminal.golden import RECORDING, TOLD
from tests.terminal.plain import Asked, Plain, ReceivedRecords, received
from tests.terminal.traced import BORNE_OUT, OF_ALL, Case, Json, Reported

pytestmark = pytest.mark.slow

NUMBER = re.compile(r"(?<![\w.,-])\d(?:[\d,]*\d)?(?:\.\d+)?(?![\w]|-\d)")
NO_NUMBERS = re.compile(
    r"\d+/\d+/\d+|\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d(\.\d+)?|\d+-\d+"  # positions, times, ranges of blocks
    r"|\b[a-z]+-\d+\b|reference count 0|kvscope \S+|:[a-z]+=\d+|lab@\S+|monitor \w+ .*"  # names, commands
)
ADVICE = ("Do now", "Change", "Won't help", "To be sure", "Runbook")
CENSUS: Final = ("running", "waiting", "finished", "unaccounted")

OF_FALSE_COUNTS: Final = "block lifetime, mean"
"""Where a block was freed twice the books follow the engine's audits, whose counts are false: which is the finding."""
MS: Final = 999_999
"""Times are cut to a millisecond where they are told: so much later it may have been."""


@pytest.fixture(scope="module", params=TOLD)
def reported(request: pytest.FixtureRequest) -> Iterator[Reported]:
    """One of the incidents, recorded in what is now the current directory."""
    code = request.param
    with golden.recorded(code):
        watch = Pipeline()
        watch.feed(Recording(Path(RECORDING)))
        watch.settle()
        commands = TOLD[code].commands
        stated = {name: _json(*arguments, "--format", "json") for name, arguments in commands.items()}
        engine = watch.engines()[0].engine
        top = [watch.engines(), watch.requests(engine), watch.findings("firing")]
        now_ns = max(frame.wall_ns for frame in Recording(Path(RECORDING)))
        yield Reported(
            code, list(received(Path(RECORDING))), watch, stated | {"top": msgspec.to_builtins(top)}, now_ns, {}
        )


def _json(*arguments: str) -> Json:
    return json.loads(golden.printed(*arguments).partition("\n")[2].rpartition("(exit")[0])


# -------------------------------------------------------------------- each number is in the JSON


@pytest.mark.parametrize("command", ["doctor", "explain", "diff", "top"])
def test_each_number_is_in_the_json_of_the_same_command(reported: Reported, command: str) -> None:
    text = reported.text(command)
    shown = _without_advice(text) if command == "doctor" else text
    found = NUMBER.findall(NO_NUMBERS.sub("", shown.rpartition("(exit code")[0] or shown))
    known = set(_written(reported.stated[command]))
    assert found
    assert [number for number in found if number not in known] == []


def _without_advice(text: str) -> str:
    """What is claimed; what is advised has figures of its own, of what would be."""
    kept = []
    advice = False
    for line in text.splitlines():
        if line[:2] == "  " and line[2:3].strip():
            advice = line[2:].startswith(ADVICE)
        if not advice:
            kept.append(line)
    return "\n".join(kept)


def _written(stated: Json) -> Iterator[str]:
    """All numbers in it as they may be written, how long its lists are, and how much of the pool is whose."""
    if isinstance(stated, Mapping):
        for value in stated.values():
            yield from _written(value)
        usable = stated.get("usable") or (stated.get("total") or 0) - (stated.get("reserved") or 0)
        if usable:
            levels = [value.get("used") for value in stated.values() if isinstance(value, Mapping)]
            blocks = [value for value in (*stated.values(), *levels) if isinstance(value, int)]
            yield from (way for count in blocks for way in _ways(count / usable))
    elif isinstance(stated, list):
        yield from _ways(len(stated))
        yield from (str(len(stated) - most) for most in (3, 8))  # `r-1, r-2, r-3 and 7 more`
        changes = [row["change"] for row in stated if isinstance(row, Mapping) and isinstance(row.get("change"), str)]
        yield from (str(changes.count(change)) for change in {*changes, "better", "worse"})
        severities = [row["severity"] for row in stated if isinstance(row, Mapping) and "severity" in row]
        yield from (str(severities.count(severity)) for severity in severities)
        for value in stated:
            yield from _written(value)
    elif isinstance(stated, str):
        yield from NUMBER.findall(stated)
    elif isinstance(stated, int | float):
        yield from _ways(stated)
        yield str(stated - 3)


def _ways(value: float) -> Iterator[str]:
    """How a figure may be written."""
    for text in (
        f"{value:,}",
        f"{value:.1f}",
        f"{value:.2f}",
        f"{value:,.3f}",
        f"{value:,.1f}",
        f"{value:,.0f}",
        f"{int(value):,}",
        percent(value),
        duration(value),
    ):
        yield text.split()[-2 if text.endswith((" %", " s", " min")) else 0]


# -------------------------------------------------------------------- doctor: the evidence, and the pool


def test_each_item_of_evidence_is_borne_out_by_the_events_until_its_position(reported: Reported) -> None:
    found = reported.stated["doctor"]["findings"]
    assert reported.code in {finding["code"] for finding in found}
    for finding in found:
        for item in finding["evidence"]:
            one, plain = reported.at(item["position"])
            case = Case(finding, item, one, plain, reported)
            assert BORNE_OUT[item["name"]](case) == item["value"], (finding["code"], item)
            if item["name"] not in OF_ALL and finding["culprits"]["requests"]:
                own = {each.number for each in case.culprits}
                event = one.event
                assert event.request < 0 or own.intersection((event.request, *event.ids)), (finding["code"], item)


def test_a_finding_begins_at_the_event_that_its_position_names(reported: Reported) -> None:
    for finding in reported.stated["doctor"]["findings"]:
        one, _ = reported.at(finding["position"])
        if finding["since"]:  # what the books find at odds has the time at which its batch was packed
            assert any(abs(_ns(finding["since"]) - at_ns) < 10**6 for at_ns in (one.at_ns, one.packed_ns))


def test_each_position_can_be_opened(reported: Reported) -> None:
    engine = reported.watch.engines()[0].engine
    positions = {item["position"] for finding in reported.stated["doctor"]["findings"] for item in finding["evidence"]}
    for position in sorted(positions):
        opened = event_at(reported.watch, [engine], position)
        one, plain = reported.at(position)
        assert opened.event.kind == Kind(one.event.kind).name.lower()
        assert position in [each.position for each in opened.around]
        assert (opened.pool.running, opened.pool.waiting) == (len(plain.running()), len(plain.waiting()))
        if reported.code != "corrupt.double-free":  # whose counts are wrong from then on, which is what it is about
            assert opened.pool.balance is not None
            assert opened.pool.balance.free + opened.pool.balance.cached_idle == plain.free
        if opened.request is not None:
            _is_borne_out(msgspec.to_builtins(opened.request.request), plain, _ns(opened.pool.at or ""))


def test_the_pool_is_what_the_events_come_to(reported: Reported) -> None:
    (balance,) = reported.stated["doctor"]["balances"]
    _engine_is_borne_out(balance, balance, reported)


def _engine_is_borne_out(view: Json, balance: Json, reported: Reported) -> None:
    end = reported.by()
    assert {name: balance[name] for name in CENSUS} == end.held_by()
    assert (balance["total"], balance["reserved"]) == (end.total, end.reserved)
    assert (balance["free"], balance["cached_idle"]) == (end.free - end.idle, end.idle)
    assert view["step"] == end.last_step
    waits = [end.cause(each).name for each in end.waiting()]
    assert view["waiting_by_reason"] == {cause: waits.count(cause) for cause in waits}


# -------------------------------------------------------------------- explain


def test_what_is_explained_is_borne_out_by_the_events(reported: Reported) -> None:
    thing = TOLD[reported.code].commands["explain"][1]
    {"request": _request_is_borne_out, "block": _block_is_borne_out, "drop": _drop_is_borne_out}[thing](reported)


def _is_borne_out(view: Json, plain: Plain, now_ns: int) -> None:
    """What is told of a request, at one moment."""
    asked = plain.named(view["id"])
    assert view["state"] == Status(asked.status).name
    figures = (
        "prompt_tokens",
        "max_tokens",
        "computed_tokens",
        "output_tokens",
        "hit_tokens",
        "preemptions",
        "tokens_lost",
    )
    theirs = (asked.prompt, asked.most, asked.computed, asked.outputs, asked.hit, asked.preemptions, asked.lost)
    assert tuple(view[name] for name in figures) == theirs
    assert view["blocks"] == len(asked.blocks)
    assert view["for_s"] == pytest.approx((now_ns - asked.since) / 1e9, abs=0.0011)


def _request_is_borne_out(reported: Reported) -> None:
    detail, end = reported.stated["explain"], reported.by()
    asked = end.named(detail["request"]["id"])
    end.now = reported.now_ns
    _is_borne_out(detail["request"], end, reported.now_ns)
    assert detail["blocks"] == asked.blocks
    assert detail["waited_s"] == {cause: round(seconds, 3) for cause, seconds in end.waited_s(asked).items()}
    room = len(asked.blocks) * end.block_size - asked.computed if asked.blocks else 0
    assert detail["unused_tokens"] == room
    about = [one for one in reported.events if _is_about(one, asked.number)]
    lines = detail["event_history"]
    for line, after in zip(lines, [*lines[1:], None], strict=True):
        place = [one.position for one in about].index(line["position"])
        rest = [one.position for one in about].index(after["position"]) if after is not None else len(about)
        assert set(_numbers(line["text"])) <= set(_numbers_of(about[place:rest], asked.number)), line
    for phase, after in zip(detail["phases"], [*detail["phases"][1:], None], strict=True):
        last = _ns(after["since"]) if after is not None else reported.now_ns
        assert phase["for_s"] == pytest.approx((last - _ns(phase["since"])) / 1e9, abs=0.0011)
        then = [(len(each.blocks), each.computed) for each in _during(reported, asked, _ns(phase["since"]), last)]
        assert (phase["blocks"], phase["computed_tokens"]) in then
    assert sum(phase["recomputed_tokens"] for phase in detail["phases"]) == asked.lost
    assert sum(phase["phase_tokens"] for phase in detail["phases"]) == asked.lost + asked.computed
    whys = " ".join(condition["reason"] for condition in detail["conditions"])
    known = {str(asked.to_finish), str(end.usable)} | set(_ways((reported.now_ns - asked.progressed) / 1e9))
    assert set(_numbers(whys)) <= known
    if detail["waits"] is not None:
        known = {*_ways((reported.now_ns - asked.since) / 1e9), str(asked.needed), str(end.usable)}
        assert set(_numbers(json.dumps(_texts(detail["waits"])))) <= known


def _texts(wait: Json) -> list[str]:
    return [wait["text"], *(text for below in wait["waits_for"] for text in _texts(below))]


def _numbers(text: str) -> list[str]:
    return NUMBER.findall(NO_NUMBERS.sub("", text))


def _numbers_of(events: Iterable[ReceivedRecords], number: int) -> Iterator[str]:
    """All that these events have in numbers about a request, and in how many steps they moved it on."""
    steps = 0
    for one in events:
        event = one.event
        if event.kind == Kind.PROGRESSED:
            place = event.ids.index(number)
            yield from (f"{value:,}" for value in event.args[place :: len(event.ids)])
            steps += 1
            yield str(steps)
        else:
            yield from (f"{value:,}" for value in (*event.args, len(event.ids)))


def _is_about(one: ReceivedRecords, number: int) -> bool:
    event = one.event
    return event.request == number or (event.kind == Kind.PROGRESSED and number in event.ids)


def _during(reported: Reported, asked: Asked, since_ns: int, until_ns: int) -> Iterator[Asked]:
    """What the request was after each event from one time to another, by the millisecond."""
    plain = Plain()
    for one in reported.events:
        plain.fold(one)
        if since_ns // 10**6 <= one.at_ns // 10**6 <= until_ns // 10**6 and asked.number in plain.requests:
            yield plain.requests[asked.number]


def _block_is_borne_out(reported: Reported) -> None:
    detail, end = reported.stated["explain"], reported.by()
    block = detail["block"]
    assert detail["references"] == len(end.holders[block])
    assert detail["hashed"] == (block in end.cached)
    changed = [
        one for one in reported.events if one.event.kind in (Kind.ALLOCATED, Kind.RELEASED) and block in one.event.ids
    ]
    assert [line["position"] for line in detail["event_history"]] == [one.position for one in changed]
    since = _ways((reported.now_ns - changed[-1].at_ns) / 1e9)
    assert set(_numbers(" ".join(link for chain in detail["ownership_chains"] for link in chain[1:]))) <= {*since}


def _drop_is_borne_out(reported: Reported) -> None:
    (drop,) = reported.stated["explain"]
    since_ns, until_ns = _ns(drop["since"]), _ns(drop["until"])
    before, after = reported.by(since_ns), reported.by(until_ns)
    assert drop["usable"] == after.usable
    assert (drop["used_before"], drop["used_after"], drop["unexplained_blocks"]) == (before.used, after.used, 0)
    counts = after.counts - before.counts
    for name, key in (
        ("admitted", "admitted"),
        ("preemptions", "preemptions"),
        ("allocation_failures", "allocations failed"),
        ("allocated", "taken"),
    ):
        assert drop[name] == counts[key], name
    ended = after.ends[len(before.ends) :]
    assert drop["finished"] == len(ended)
    assert {freed["reason"]: freed["blocks"] for freed in drop["freed"]} == dict(after.freed - before.freed)
    for freed in drop["freed"]:
        assert set(freed["requests"]) == {after.requests[number].name for _, number in ended}
    takers = {
        one.event.request
        for one in reported.events
        if since_ns < one.packed_ns <= until_ns and one.event.kind in (Kind.ALLOCATED, Kind.REUSED)
    }
    assert set(drop["allocated_to"]) == {after.requests[number].name for number in takers}
    levels = [sum(look.held.values()) for look in after.looks if since_ns <= look.at_ns]
    assert (drop["highest"]["used"], drop["lowest"]["used"]) == (max(levels), min(levels))
    top, bottom = (reported.by(_ns(drop[name]["at"]) + MS) for name in ("highest", "lowest"))
    assert drop["freed_in_drop"] == dict(bottom.freed - top.freed)
    assert (drop["running_after"], drop["waiting_after"]) == (len(after.running()), len(after.waiting()))
    for name, then, until in (("work_before", 2 * since_ns - until_ns, since_ns), ("work", since_ns, until_ns)):
        first, last, work = reported.by(then), reported.by(until), drop[name]
        assert work["steps"] == last.counts["steps"] - first.counts["steps"]
        earlier, later = ([look for look in after.looks if look.at_ns <= ns][-1] for ns in (then, until))
        assert work["output_tokens"] == later.output_tokens - earlier.output_tokens
        assert work["computed_tokens"] == last.counts["launched_tokens"] - first.counts["launched_tokens"]
        assert work["limits"] == dict(last.limits - first.limits)
        assert work["seconds"] == (until - then) / 1e9
        ends = [
            one.at_ns
            for one in reported.events
            if one.event.kind == Kind.STEP_COMPLETED and then < one.packed_ns <= until
        ]
        gaps = [later - earlier for earlier, later in zip([then, *ends], [*ends, until], strict=True)]
        assert work["longest_without_step_s"] == pytest.approx(max(gaps) / 1e9, abs=0.0011)


# -------------------------------------------------------------------- diff


def test_what_is_compared_is_borne_out_by_the_events(reported: Reported) -> None:
    diff = reported.stated["diff"]
    for side in ("before", "after"):
        for row, value in zip(diff["metrics"], _figures(reported, diff[side]), strict=True):
            if row["name"] == OF_FALSE_COUNTS and reported.code == "corrupt.double-free":
                continue
            near = None if value is None else pytest.approx(value, abs=0.001 if row["unit"] == "s" else 1e-9)
            assert row[side] == near, (side, row["name"])
    for row in diff["findings"]:
        found = [
            finding
            for finding in diff["after"]["findings"] or diff["before"]["findings"]
            if finding["code"] == row["code"]
        ]
        assert row["requests"] == [name for finding in found for name in finding["culprits"]["requests"]]


def _figures(reported: Reported, side: Json) -> Iterator[float | None]:
    """Those of one side, in the order in which they are told."""
    since_ns, until_ns = _ns(side["since"]), _ns(side["until"])
    before, after = reported.by(since_ns - 1), reported.by(until_ns + MS)
    after.now = until_ns
    seconds = side["seconds"]
    assert seconds == pytest.approx((until_ns - since_ns) / 1e9, abs=0.002)
    counts = after.counts.copy()
    counts.subtract(before.counts)
    for name in ("output_tokens", "computed_tokens"):
        yield counts[name] / seconds
    for name in ("served", "not_served", "preemptions", "tokens_lost"):
        yield counts[name] * 60 / seconds
    for part, whole in (("recomputed_tokens", "computed_tokens"), ("hit_tokens", "looked_up_tokens")):
        yield counts[part] / counts[whole] if counts[whole] else None
    lived = after.lifetimes[len(before.lifetimes) :]
    yield sum(lived) / len(lived) / 1e9 if lived else None
    yield None  # nothing was evicted
    ended = {number for _, number in after.ends[len(before.ends) :]}
    there = [each for each in after.requests.values() if each.number in ended or each.status < Status.FINISHED_STOPPED]
    first = [(each.first_token - each.arrived) / 1e9 for each in there if each.first_token >= max(since_ns, 1)]
    yield from _quantiles(first)
    yield from (None, None)  # queue time is of metrics alone: a stream has the waits by their cause
    causes = {cause for name in ("before", "after") for cause in reported.stated["diff"][name]["waited_s"]}
    mine: dict[str, list[float]] = {}
    for each in there:
        for cause, waited in after.waited_s(each).items():
            mine.setdefault(cause, []).append(waited)
    for cause in sorted(causes):
        yield from _quantiles(mine.pop(cause, []))
    assert not mine
    most = max((look.held for look in after.looks if look.at_ns >= since_ns), key=lambda held: sum(held.values()))
    for holders in (CENSUS, ("finished",), ("unaccounted",)):
        yield sum(most[name] for name in holders) / after.usable


def _quantiles(values: list[float]) -> tuple[float | None, float | None]:
    """The median and the 95th percentile: the least of them that as large a share of them is not above."""
    ranked = sorted(values)
    if not ranked:
        return None, None
    half, most = (next(n for n in range(len(ranked)) if n + 1 >= share * len(ranked)) for share in (0.5, 0.95))
    return ranked[half], ranked[most]


# -------------------------------------------------------------------- top


def test_what_top_shows_is_borne_out_by_the_events(reported: Reported) -> None:
    (engine,), requests, findings = reported.stated["top"]
    end = reported.by()
    end.now = reported.now_ns
    _engine_is_borne_out(engine, engine["balance"], reported)
    assert engine["usage"] == end.used / end.usable
    assert engine["output_tokens_per_s"] == 0
    assert {finding["id"] for finding in findings} <= {
        finding["id"] for finding in reported.stated["doctor"]["findings"]
    }
    living = [view for view in requests if not view["ended"]]
    assert {view["id"] for view in living} == {
        each.name for each in end.requests.values() if each.blocks or each.status < Status.FINISHED_STOPPED
    }
    for view in living:
        _is_borne_out(view, end, reported.now_ns)


# -------------------------------------------------------------------- parts


def _ns(stamp: str) -> int:
    return round(datetime.fromisoformat(stamp).timestamp() * 1e3) * 10**6
