"""Pairs the prefill and decode engines of a service, and states which side holds the other up.

A statement rests on findings that fire, never on the numbers of one moment: a healthy pair holds blocks and waits for
transfers all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from kvscope.monitor.fleet_schema import UNSERVED_STATUSES, FleetEngineView, FleetService, HeldUpBy
from kvscope.monitor.text import counted

HELD_CODES: Final = frozenset({"leak.finished-held", "leak.lease-burst", "leak.idle-not-polled"})
"""A producer's blocks stay held for transfers that are not reported complete."""
FETCH_CODES: Final = frozenset({"stuck.remote-load", "leak.remote-load-lost"})
"""A consumer's fetches of remote KV do not complete."""
NAMED_ENGINES: Final = 3


class _Statement(NamedTuple):
    held_up_by: HeldUpBy = "none"
    verdict: Literal["", "likely", "cannot-tell"] = ""
    text: str = ""


def paired_services(engines: Sequence[FleetEngineView]) -> list[FleetService]:
    """Return the services that have engines on both sides, those with a statement first.

    Engines belong together by their service's name, or by model and zone where they have none.
    """
    groups: dict[tuple[str, str, str], list[FleetEngineView]] = {}
    for engine in engines:
        if engine.kv_role in ("producer", "consumer"):
            unnamed = ("", "") if engine.service else (engine.model, engine.zone)
            groups.setdefault((engine.service, *unnamed), []).append(engine)
    services = [
        _service(name or " · ".join(filter(None, (model, zone))) or "unnamed", "service" if name else "model", members)
        for (name, model, zone), members in groups.items()
        if len({each.kv_role for each in members}) == 2
    ]
    return sorted(services, key=lambda each: (not each.statement, each.name))


def _service(name: str, grouped_by: Literal["service", "model"], members: Sequence[FleetEngineView]) -> FleetService:
    producers = [each for each in members if each.kv_role == "producer"]
    consumers = [each for each in members if each.kv_role == "consumer"]
    statement = _statement(producers, consumers)
    return FleetService(
        name=name,
        grouped_by=grouped_by,
        producers=[each.engine for each in producers],
        consumers=[each.engine for each in consumers],
        held_blocks=_known_sum([each.held_blocks for each in producers]),
        fetching=_known_sum([each.fetching for each in consumers]),
        held_up_by=statement.held_up_by,
        verdict=statement.verdict,
        statement=statement.text,
    )


def _statement(producers: Sequence[FleetEngineView], consumers: Sequence[FleetEngineView]) -> _Statement:
    holding = [each for each in producers if HELD_CODES & set(each.codes)]
    fetching = [each for each in consumers if FETCH_CODES & set(each.codes)]
    if fetching and holding:
        return _Statement(
            "transfer",
            "cannot-tell",
            f"{_fetching_text(fetching)}, and {_holding_text(holding)}: transfers between them do not complete. The"
            " engines' streams do not show which end of a transfer failed.",
        )
    if fetching:
        return _of_fetching(fetching, producers)
    if holding:
        return _of_holding(holding, consumers)
    return _Statement()


def _of_fetching(fetching: Sequence[FleetEngineView], producers: Sequence[FleetEngineView]) -> _Statement:
    away = [each for each in producers if each.status in UNSERVED_STATUSES]
    if away:
        return _Statement(
            "producers",
            "likely",
            f"{_fetching_text(fetching)}, and {_status_text(away)}. The KV may also be due from another producer.",
        )
    unknown = [each for each in producers if each.harm == "unknown"]
    seen = f" Nothing is known of {_names(unknown)} now." if unknown else ""
    return _Statement(
        "transfer",
        "cannot-tell",
        f"{_fetching_text(fetching)}. No producer is stuck, silent or stopped, or has a finding about held blocks."
        f"{seen}",
    )


def _of_holding(holding: Sequence[FleetEngineView], consumers: Sequence[FleetEngineView]) -> _Statement:
    stuck = [each for each in consumers if each.status in UNSERVED_STATUSES]
    if stuck:
        return _Statement(
            "consumers",
            "likely",
            f"{_holding_text(holding)}, and {_status_text(stuck)}. The producer's own connector may have failed, too.",
        )
    blind = [each for each in consumers if each.fetching is None]
    if blind:
        return _Statement(
            "none",
            "cannot-tell",
            f"{_holding_text(holding)}. Whether consumers wait for them is not exposed by {_names(blind)}.",
        )
    return _Statement(
        "none",
        "cannot-tell",
        f"{_holding_text(holding)}. No consumer is stuck, silent or stopped, or has a finding about its fetches.",
    )


def _holding_text(holding: Sequence[FleetEngineView]) -> str:
    blocks = _known_sum([each.held_blocks for each in holding])
    amount = "blocks" if blocks is None else counted(blocks, "block")
    return f"{_names(holding)} hold{'s' if len(holding) == 1 else ''} {amount} of finished requests for transfers"


def _fetching_text(fetching: Sequence[FleetEngineView]) -> str:
    requests = _known_sum([each.fetching for each in fetching])
    amount = "requests" if requests is None else counted(requests, "request")
    verb = "waits" if requests == 1 else "wait"
    return f"{amount} of {_names(fetching)} {verb} for KV whose fetch does not complete"


def _status_text(engines: Sequence[FleetEngineView]) -> str:
    return " and ".join(f"{each.engine} is {each.status}" for each in engines[:NAMED_ENGINES]) + _more(engines)


def _names(engines: Sequence[FleetEngineView]) -> str:
    return ", ".join(each.engine for each in engines[:NAMED_ENGINES]) + _more(engines)


def _more(engines: Sequence[FleetEngineView]) -> str:
    return f" and {len(engines) - NAMED_ENGINES} more" if len(engines) > NAMED_ENGINES else ""


def _known_sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
