"""What is sent of a finding: which of its transitions, in which message, and what silences hold back.

A silence holds back what begins to fire, and reminders of it. If the alert still fires at its end, a notification
follows then. The end of an alert whose start was sent is always sent, so that no incident stays open behind a silence.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple

import msgspec

from ...base.errors import KvscopeError
from ...base.http_url import HttpUrl
from ...base.text import counted, cut, duration, moment, percent, timestamp
from ...detectors.findings import Finding, FindingInterval, FindingReport, FindingState, Place, Transition
from ...detectors.judgement import VERDICTS, FindingHarm, Severity, Verdict
from ...questions.schema import AlertView, DeliveryState, DeliveryView, ReceiverView, SilenceView

ENDS: Final[tuple[DeliveryState, ...]] = ("delivered", "given-up", "damped", "disabled")
"""How a message can end."""


class ReceiverFigures(msgspec.Struct, frozen=True):
    """How it goes with one receiver, in figures: what waits and for how long at most (0: nothing waits), and since the
    service was started how messages to it ended, and how many tries of them failed.
    """

    name: str
    disabled: bool
    pending: int
    oldest_pending_s: float
    ended: dict[DeliveryState, int]
    failed_tries: int


class AlertFigures(msgspec.Struct, frozen=True):
    """How it goes with alerts, in figures."""

    receivers: list[ReceiverFigures] = []
    open: int | None = None
    silences: int | None = None


class AlertsView(msgspec.Struct, frozen=True):
    """All alerts, silences and receivers, and the latest deliveries."""

    receivers: list[ReceiverView]
    open: list[AlertView]
    silences: list[SilenceView]
    deliveries: list[DeliveryView]


class TriedView(msgspec.Struct, frozen=True):
    """The answer of a receiver to a test."""

    receiver: str
    delivered: bool
    answer: str


MessageKind = Literal["firing", "changed", "resolved", "test"]

MOST_REQUESTS: Final = 20
MAX_MESSAGE_LINES: Final = 5
LONGEST_ID: Final = 100
LONGEST_TEXT: Final = 1_500
LONGEST_LINE: Final = 300
"""All of these keep a message below the 20 kB that the Standard Webhooks specification asks for."""
_LINK: Final = re.compile(r":(?=//)(?!//HOST:8000/)|(?<=\bwww)\.|(?<=\bmailto):", re.IGNORECASE)
"""What makes a link of a text. The address in kvscope's own commands, http://HOST:8000/metrics, stays as it is."""


class MessageCulprits(msgspec.Struct, frozen=True):
    """The requests of the finding: the first ids, and how many there are."""

    requests: list[str]
    requests_in_all: int
    blocks_in_all: int


class AlertLinks(msgspec.Struct, frozen=True):
    """Addresses of the page of kvscope: of the finding, of its engine at that time, and of its runbook."""

    finding: str
    engine: str
    runbook: str


CHANGED_S: Final = 300.0
"""The text of an alert is at most this old, and one that changes is sent again at most this often. A responder needs
about as long to read a message and look around: more of them would interrupt that.
"""
GROWN: Final = 1.25
"""A size that differs by a quarter is another one. Less, and the decision of whoever reads the alert stays the same."""


class Gist(NamedTuple):
    """What a responder decides by. `size` are the blocks, or else the requests, that the finding names (0: neither)."""

    verdict: Verdict
    severity: Severity
    size: int

    def differences(self, before: Gist) -> list[str]:
        """Say what differs from `before`, as a responder reads it."""
        low, high = sorted((self.size, before.size))
        texts = [
            f"{name} was {old}, is {new}"
            for name, old, new in zip(("verdict", "severity"), before[:2], self[:2], strict=True)
            if old != new
        ]
        return texts + [f"size was {before.size:,}, is {self.size:,}"] * (high >= GROWN * low and high > low)


class AlertedFinding(msgspec.Struct, frozen=True):
    """A finding in a notification. `id` is the alert's: the same from its first message to its last."""

    id: str
    code: str
    title: str
    severity: Severity
    verdict: Verdict
    state: FindingState
    engine: str
    key: str
    since: str | None
    resolved_at: str | None
    culprits: MessageCulprits
    explanation: str
    effects: list[str]
    """Codes of its effects, which its notification covers."""
    do_now: list[str]
    runbook: str
    links: AlertLinks | None = None
    """None where --public-url names no page."""
    harm: FindingHarm | None = None
    """None where it is not measured."""
    earlier: list[FindingInterval] = []
    """When it fired before: a finding that returns within RETURNS_S is the same alert."""

    @property
    def gist(self) -> Gist:
        """What another message would have to differ in."""
        return Gist(self.verdict, self.severity, self.culprits.blocks_in_all or self.culprits.requests_in_all)

    @property
    def headline(self) -> str:
        """Say what clients suffer, then what it is and where."""
        waiting = self.harm.requests_waiting if self.harm is not None and self.state == "firing" else None
        suffer = f"{counted(waiting, 'request')} {'waits' if waiting == 1 else 'wait'}: " if waiting else ""
        return f"{suffer}{self.title} on {without_links(self.engine)}"

    @property
    def text(self) -> str:
        """Say what clients suffer, then the explanation, then when it fired before."""
        harm, parts = self.harm, [self.explanation]
        if harm is not None and harm.requests_waiting is not None and self.state == "firing":
            of_all = harm.share_of_requests
            share = "" if of_all is None else f", {percent(of_all)} of the engine's"
            waited = f"; together {duration(harm.lost_s)} so far" if harm.lost_s else ""
            parts.insert(0, f"Requests that wait because of this: {harm.requests_waiting:,}{share}{waited}.")
        if self.earlier:
            last = self.earlier[-1]
            parts.append(f"It fired before, from {last.since} to {last.resolved_at}, and returned.")
        return " ".join(parts)


class Message(msgspec.Struct, frozen=True):
    """One message. `at` is RFC 3339. `firing` are all codes that fire on the engine, including this one.

    `repeat` counts the earlier reminders that this still fires. `flapping`: it fired and resolved so often that
    notifications pause until it has been quiet for a while. `changes` is what differs from the message before, whose
    severity was `severity_before`.
    """

    id: str
    kind: MessageKind
    at: str
    finding: AlertedFinding = msgspec.field(name="trouble")
    firing: list[str] = []
    repeat: int = 0
    flapping: bool = False
    changes: list[str] = []
    severity_before: Severity | None = None


def alerted_finding(
    report: FindingReport, alert: str, key: str, to: Literal["firing", "resolved"], page: HttpUrl | None = None
) -> AlertedFinding:
    """Return a finding as its alert reports it, cut to a size that every receiver takes. Its state is what the
    transition brought it `to`, whatever came after. `page`: where people open kvscope.
    """
    requests = [cut(name, LONGEST_ID) for name in report.culprits.requests[:MOST_REQUESTS]]
    return AlertedFinding(
        id=alert,
        code=report.code,
        title=report.title,
        severity=report.severity,
        verdict=report.verdict,
        state=to,
        engine=report.engine,
        key=cut(key, LONGEST_ID),
        since=report.since,
        resolved_at=report.resolved_at if to == "resolved" else None,
        culprits=MessageCulprits(requests, len(report.culprits.requests), len(report.culprits.blocks)),
        explanation=cut(without_links(report.explanation), LONGEST_TEXT),
        effects=[effect.code for effect in report.effects],
        do_now=[cut(without_links(line), LONGEST_LINE) for line in report.do_now[:MAX_MESSAGE_LINES]],
        runbook=report.runbook,
        links=_links(report, page) if page is not None else None,
        harm=report.harm,
    )


SEEN_BESIDE_S: Final = 60.0
"""A link to the engine shows so much before its finding began, and after it ended: the change is in the picture."""


def _links(report: FindingReport, page: HttpUrl) -> AlertLinks:
    span = {"from": _later(report.since, -SEEN_BESIDE_S), "to": _later(report.resolved_at, SEEN_BESIDE_S)}
    then = {name: at for name, at in span.items() if at is not None}
    return AlertLinks(
        str(page.below("/finding", {"id": report.id})),
        str(page.below("/engine", {"engine": report.engine, **then})),
        str(page.below(f"/{report.runbook}")),
    )


def _later(at: str | None, seconds: float) -> str | None:
    return None if at is None else timestamp(moment(at, 0) + round(seconds * 1e9))


def message_id(finding: str, to: str, at_ns: int) -> str:
    """Return an id that is the same for all deliveries of a transition and differs from all others."""
    return f"msg_{hashlib.blake2b(f'{finding} {to} {at_ns}'.encode(), digest_size=12).hexdigest()}"


def without_links(text: str) -> str:
    """Return a text in which no receiver finds a link to show: https://a becomes https[:]//a. Clients choose the ids of
    their requests, and whoever reads an alert trusts it.
    """
    return _LINK.sub(lambda match: f"[{match[0]}]", text)


LEAST_VERDICT: Final[Verdict] = "likely"
"""A finding that cannot tell names the signal that is missing: it is shown, and wakes nobody."""


class AlertSelection:
    """Holds back what fires with a verdict below `least` until it reaches that, and findings about kvscope itself if
    there are to be alerts of engines only. Findings that were let through come again when their verdict or severity
    changes, so that receivers and silences go by what holds now, and every CHANGED_S while their text does.
    """

    def __init__(self, least: Verdict = LEAST_VERDICT, *, engines_only: bool = False) -> None:
        self._least = VERDICTS.index(least)
        self._engines_only = engines_only
        self._open: dict[str, tuple[Transition, tuple[Verdict, Severity, str] | None]] = {}
        """By finding id: the transition let through last, and its verdict, severity and text (None: held)."""

    def resume(self, transitions: Iterable[Transition], told: Container[Place]) -> None:
        """Take what fired again as a service took up where an earlier life of it ended. That life let through what is
        in `told`. It held back the rest, or was killed before it could let it through.
        """
        for transition in transitions:
            finding = transition.finding
            self._open.pop(finding.id, None)
            if transition.to == "firing" and self._is_chosen(transition):
                self._open[finding.id] = (transition, _state_of(finding) if finding.place in told else None)

    def _is_chosen(self, transition: Transition) -> bool:
        return not (self._engines_only and transition.finding.outlasts_epoch)

    def select(self, transitions: Iterable[Transition]) -> list[Transition]:
        """Take what is new, and return what becomes or changes an alert now."""
        selected: list[Transition] = []
        for transition in transitions:
            id = transition.finding.id
            if not self._is_chosen(transition):
                continue
            if transition.to == "firing":
                self._open[id] = (transition, None)
                continue
            _, let_through = self._open.pop(id, (transition, ("confirmed", "info", "")))
            if let_through is not None:
                selected.append(transition)
        for id, (transition, let_through) in self._open.items():
            finding = transition.finding
            now, at_ns = _state_of(finding), max(finding.last_seen_ns, transition.at_ns)
            if let_through is None:
                chosen = VERDICTS.index(now[0]) >= self._least
            else:
                is_late = at_ns - transition.at_ns >= CHANGED_S * 1e9
                chosen = now[:2] != let_through[:2] or (is_late and now != let_through)
                transition = transition._replace(at_ns=at_ns)  # a message of its own, where a hub reads it
            if chosen:
                self._open[id] = (transition, now)
                selected.append(transition)
        return selected


def _state_of(finding: Finding) -> tuple[Verdict, Severity, str]:
    return finding.judgement.verdict, finding.severity, finding.judgement.explanation


MATCHABLE: Final = ("code", "engine", "severity", "verdict", "key")
LONGEST_S: Final = 366 * 86400.0


class BadSilence(KvscopeError, ValueError):
    """A matcher or a length that cannot be used. The message names the valid form."""


class Silence(msgspec.Struct, frozen=True):
    """No notifications for alerts that match all of `matchers` (NAME=PATTERN, with * and ?) until `until` (wall
    seconds).
    """

    matchers: tuple[str, ...]
    until: float
    comment: str = ""

    def matches(self, alerted: AlertedFinding) -> bool:
        """Whether it is about this one."""
        return all(
            fnmatchcase(getattr(alerted, name), pattern)
            for name, _, pattern in (matcher.partition("=") for matcher in self.matchers)
        )

    def view(self, number: int) -> SilenceView:
        """Return it for the API."""
        return SilenceView(number, list(self.matchers), timestamp(round(self.until * 1e9)) or "", self.comment)


def silence(matchers: Sequence[str], seconds: float, comment: str, now: float) -> Silence:
    """From `now` (wall seconds) for so long. Raises BadSilence."""
    if not matchers:
        raise BadSilence("a silence needs at least one matcher, such as code=leak.* or engine=NAME")
    for matcher in matchers:
        name, equals, pattern = matcher.partition("=")
        if name not in MATCHABLE or not equals or not pattern:
            raise BadSilence(f"{matcher}: give NAME=PATTERN, where NAME is one of {', '.join(MATCHABLE)}")
    if not 0 < seconds <= LONGEST_S:
        raise BadSilence(f"{seconds:g} s: a silence lasts more than 0 s and at most {LONGEST_S:g} s")
    return Silence(tuple(matchers), now + seconds, comment)
