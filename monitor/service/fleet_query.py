"""Answers the questions of `Query` for all engines of a tenant.

Engines at a glance and findings come from the streams. Everything about one engine comes from the agent that has it,
and what is about all of them in the past from all agents at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import msgspec

from ..base.errors import KvscopeError, NotKnown, Unreachable
from ..base.text import duration, timestamp
from ..detectors.findings import Finding, FindingReport, FindingState, finding_order
from ..fleet.bus_messages import PointMessage
from ..fleet.fleet_fold import FleetFold
from ..fleet.fleet_link import LATE_AGENT_S, FleetLink
from ..questions.fleet_overview import findings_by_engine, fleet_engine, fleet_view
from ..questions.fleet_schema import FleetAgentView, FleetNote, FleetView
from ..questions.query import QUESTIONS, Query, Question
from ..questions.recent_past import parse_stream_time
from ..questions.schema import AlertStateView, EngineView, FindingDetail, NotificationsView, RequestSearch
from ..questions.windows import FOREVER, touches
from .hub_findings import HubFindings

ASK_S: Final = 10.0
SQL_S: Final = 20.0
AGENTS_AT_ONCE: Final = 16
MOST_NOTES: Final = 50
FLEET_GONE_S: Final = 900.0
"""An engine of which no point came for so long is gone."""


class FleetQuery(Query):
    """The engines of `link`'s tenant, with what the hub itself finds (`own`). Thread-safe."""

    def __init__(self, link: FleetLink, own: HubFindings) -> None:
        self._link = link
        self._own = own
        self._threads = ThreadPoolExecutor(AGENTS_AT_ONCE, thread_name_prefix="kvscope-agents")
        self._open = _OpenFindings(-1, [], {})
        self.find_notifications: Callable[[str], NotificationsView] = lambda _finding: NotificationsView()
        self.find_alerts: Callable[[], AlertStateView] = AlertStateView

    def close(self) -> None:
        """Ask no more agents."""
        self._threads.shutdown(cancel_futures=True)

    def answer(self, question: Question, arguments: Mapping[str, Any]) -> Any:
        """Answer from the streams where this class does, else ask the agent that has the engine."""
        own = vars(FleetQuery).get(question.name)
        if own is not None:
            return own(self, **arguments)
        return self._ask_owner(question, arguments)

    def sql(self, engine: str, query: str, since: str = "", until: str = "") -> bytearray:
        """Return SqlRows of a query over what an engine's agent keeps, as JSON. Raises KvscopeError."""
        arguments = {"query": query, "since": since, "until": until}
        return self._link.ask(self._owner(engine), "sql", arguments, SQL_S)

    # ---------------------------------------------------------------- asking agents

    def _owner(self, engine: str) -> str:
        """Return the agent that has an engine. Raises NotKnown."""
        agent = self._link.owners.owner(engine)
        if not agent:
            with self._link.fold() as fold:
                some = sorted(fold.points)[:20]
            more = ", …" if len(some) == 20 else ""
            raise NotKnown(
                f"there is no engine {engine[:200]!r} here; there are: {', '.join(some) or 'none yet'}{more}"
            )
        return agent

    def _ask_owner(self, question: Question, arguments: Mapping[str, Any]) -> Any:
        other = arguments.get("other", "")
        agent = self._owner(arguments["engine"])
        if other and self._owner(other) != agent:
            raise NotKnown(
                f"{other} is on another agent than {arguments['engine']}: a hub compares engines of one agent"
            )
        return self._ask(agent, question, arguments)

    def _ask(self, agent: str, question: Question, arguments: Mapping[str, Any]) -> Any:
        payload = self._link.ask(agent, question.name, arguments, question.timeout_s or ASK_S)
        try:
            return msgspec.json.decode(payload, type=question.answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Unreachable(f"agent {agent} answers as another release does: {error}") from error

    def _ask_all(self, question: Question, arguments: Mapping[str, Any]) -> tuple[list[Any], list[KvscopeError]]:
        """Ask every agent that has engines. Return their answers and the errors of the others."""
        with self._link.fold() as fold:
            agents = sorted(fold.owners.engines())
        asked = [self._threads.submit(self._ask, agent, question, arguments) for agent in agents]
        answers: list[Any] = []
        errors: list[KvscopeError] = []
        for each in asked:
            try:
                answers.append(each.result())
            except KvscopeError as error:
                errors.append(error)
        return answers, errors

    # ---------------------------------------------------------------- engines

    def _open_now(self, fold: FleetFold) -> _OpenFindings:
        """Return what fires, computed again only after a transition. The fold is lent."""
        if self._open.version != fold.findings_version:
            self._open = _findings_of_fold(fold)
        return self._open

    def engines(self, at: str = "", engine: str = "") -> list[EngineView]:
        """Return every engine at a glance, by name. For the past, its agent answers."""
        if not at:
            with self._link.fold() as fold:
                points = [fold.points[engine]] if engine in fold.points else [] if engine else [*fold.points.values()]
                counts = self._open_now(fold).counts
            views = [self._view(point, counts.get(point.engine.engine, {})) for point in points]
            return sorted(views, key=lambda view: view.engine)
        if engine:
            found = self._ask_owner(QUESTIONS["engines"], {"at": at, "engine": engine})
            return [view for view in found if view.engine == engine]
        answers, errors = self._ask_all(QUESTIONS["engines"], {"at": at})
        if not answers and errors:
            raise errors[0]
        return sorted((view for answer in answers for view in answer), key=lambda view: view.engine)

    def _view(self, point: PointMessage, counts: dict[str, int]) -> EngineView:
        """Return an engine as its last point shows it, or `unknown` once that is old."""
        age_s = self._link.age_s(point.engine.engine)
        view = msgspec.structs.replace(
            point.engine, findings=counts, last_seen_s_ago=round(point.engine.last_seen_s_ago + age_s, 1)
        )
        if age_s <= LATE_AGENT_S:
            return view
        return msgspec.structs.replace(
            view,
            status="gone" if age_s > FLEET_GONE_S else "unknown",
            output_tokens_per_s=None,
            computed_tokens_per_s=None,
        )

    def past_engines(self) -> list[EngineView]:
        """Engines that only the history of an agent knows are listed by that agent: none here."""
        return []

    def fleet_overview(self) -> FleetView:
        """Every engine in a line, with its agent."""
        views = self.engines()
        with self._link.fold() as fold:
            points = dict(fold.points)
            found = list(self._open_now(fold).reports)
            unreadable = dict(fold.unreadable)
            noted = list(fold.annotations.values())[-MOST_NOTES:]
        found += [finding.report() for finding in self._own.firing()]
        own = findings_by_engine(found)
        lines = [
            fleet_engine(
                view,
                own.get(view.engine, ()),
                points[view.engine].usage,
                agent=self._link.owners.owner(view.engine),
                zone=points[view.engine].zone,
                node=points[view.engine].node,
                service=points[view.engine].service,
                kv_role=points[view.engine].kv_role,
                age_s=self._link.age_s(view.engine),
            )
            for view in views
            if view.engine in points
        ]
        agents = self._agents({line.agent: (line.zone, line.node) for line in lines})
        notes = [
            FleetNote(timestamp(each.at_ns), each.engine, each.kind, each.text, each.agent)
            for each in reversed(noted)  # in the order of the stream
        ]
        notes[:0] = [
            FleetNote(
                timestamp(failure.since_ns),
                "",
                "worker-failed",
                f"{failure.worker} of this hub does not work: {failure.error}",
                self._link.config.agent,
            )
            for failure in self._link.supervisor.failures()
        ]
        return fleet_view(lines, found, agents, notes, is_complete=self._link.is_complete, unreadable=unreadable)

    def _agents(self, places: Mapping[str, tuple[str, str]]) -> list[FleetAgentView]:
        agents = []
        with self._link.fold() as fold:
            owned = fold.owners.engines()
        for agent, engines in owned.items():
            age_s = self._link.agent_age_s(agent)
            if age_s == float("inf"):
                continue  # known from its engines alone: it sent nothing for as long as the streams keep
            late = f"has sent nothing for {duration(age_s)}" if age_s > LATE_AGENT_S else ""
            zone, node = places.get(agent, ("", ""))
            agents.append(
                FleetAgentView(
                    agent, len(engines), round(age_s, 1), late or self._link.silence_of(agent), zone=zone, node=node
                )
            )
        return agents

    # ---------------------------------------------------------------- findings

    def findings(
        self, state: FindingState | None = None, engine: str = "", since: str = "", until: str = ""
    ) -> list[FindingReport]:
        """Return findings, the most severe first. Only the agents know those that have not fired."""
        if state in ("pending", "suppressed"):
            arguments = {"state": state, "engine": engine, "since": since, "until": until}
            if engine:
                return list(self._ask_owner(QUESTIONS["findings"], arguments))
            answers, _ = self._ask_all(QUESTIONS["findings"], arguments)
            return [finding for answer in answers for finding in answer]
        from_ns, to_ns = self._time_ns(since, 0), self._time_ns(until, FOREVER)
        found: list[Finding] = []
        if state in (None, "firing"):
            with self._link.fold() as fold:
                found += fold.open_findings(engine)
            found = sorted([*found, *_of_engine(engine, self._own.firing())], key=finding_order)
        if state in (None, "resolved"):
            with self._link.fold() as fold:
                found += _of_engine(engine, reversed(fold.resolved_findings()))
            found += _of_engine(engine, self._own.resolved())
        return [finding.report() for finding in found if touches(finding, from_ns, to_ns)]

    def _time_ns(self, text: str, default_ns: int) -> int:
        """Return the time that a text names (wall ns). A position is in the stream of one engine. Raises BadTime."""
        if not text:
            return default_ns
        named = parse_stream_time(text, time.time_ns())
        if named.position is None:
            return named.at_ns
        with self._link.fold() as fold:
            names = [name for name, point in fold.points.items() if point.engine.epoch == named.position.epoch]
        for name in names:
            for view in self.engines(text, name):
                return parse_stream_time(view.at or "", time.time_ns()).at_ns
        raise NotKnown(f"{named} is in no engine's stored stream")

    def finding(self, id: str) -> FindingDetail:
        """One finding: from the agent that has its engine, or without points if that does not answer."""
        with self._link.fold() as fold:
            found = fold.finding(id)
        own = self._own.finding(id)
        if own is not None:
            return FindingDetail(own.report(), [])
        if found is None:
            raise NotKnown(f"there is no finding {id[:100]!r}: it is not known here, or ended too long ago")
        try:
            detail: FindingDetail = self._ask(self._owner(found.judgement.engine), QUESTIONS["finding"], {"id": id})
        except (NotKnown, Unreachable):
            return FindingDetail(found.report(), [])
        return detail

    def notifications(self, finding: str) -> NotificationsView:
        """Notifications about one finding, by the hub that sends alerts."""
        return self.find_notifications(finding)

    def alert_state(self) -> AlertStateView:
        """Alerts as the hub has them that sends them."""
        return self.find_alerts()

    # ---------------------------------------------------------------- requests of all engines

    def find_request(
        self, id: str, engine: str = "", since: str = "", until: str = "", limit: int = 50
    ) -> RequestSearch:
        """Return requests by a part of their id. The result is incomplete if an agent does not answer."""
        question = QUESTIONS["find_request"]
        arguments = {"id": id, "engine": engine, "since": since, "until": until, "limit": limit}
        if engine:
            found: RequestSearch = self._ask_owner(question, arguments)
            return found
        answers, errors = self._ask_all(question, arguments)
        if errors and not answers:
            raise errors[0]
        listed = [one for answer in answers for one in answer.requests]
        listed.sort(key=lambda one: one.first_seen or "", reverse=True)
        return RequestSearch(
            requests=listed[:limit],
            searched_since=max((answer.searched_since or "" for answer in answers), default="") or None,
            is_complete=not errors and len(listed) <= limit and all(answer.is_complete for answer in answers),
        )


def _of_engine(engine: str, findings: Iterable[Finding]) -> list[Finding]:
    return [each for each in findings if engine in ("", each.judgement.engine)]


class _OpenFindings(NamedTuple):
    """The firing findings at a version of the fold: the reports, and counts by engine and severity."""

    version: int
    reports: list[FindingReport]
    counts: dict[str, dict[str, int]]


def _findings_of_fold(fold: FleetFold) -> _OpenFindings:
    found = sorted(fold.open_findings(), key=finding_order)
    counts: dict[str, dict[str, int]] = {}
    for finding in found:
        of_engine = counts.setdefault(finding.judgement.engine, {})
        of_engine[finding.severity] = of_engine.get(finding.severity, 0) + 1
    return _OpenFindings(fold.findings_version, [finding.report() for finding in found], counts)
