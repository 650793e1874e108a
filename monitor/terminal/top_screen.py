"""`monitor top`: engines, requests and findings at a terminal, while they go on."""

from __future__ import annotations

import asyncio
import io
from typing import ClassVar, NamedTuple

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from ..base.errors import NotKnown, Unreachable
from ..base.supervision import SupervisedThread, Supervisor
from ..base.text import escaped
from ..detectors.findings import FindingReport
from ..questions.schema import EngineView, RequestView
from . import explain_text, top_text
from .terminal import WIDTH, terminal_console
from .watch_mode import Live

LOOK_EVERY_S = 0.5
TOP_LOOK_WITHIN_S = 60.0
SORTS = {"blocks": "blocks held", "for_s": "time in state"}


class View(NamedTuple):
    """The data on screen at one time. `failure`: why the target is unreachable just now, or empty."""

    engines: list[EngineView]
    engine: str
    requests: list[RequestView]
    findings: list[FindingReport]
    failure: str


class Looker:
    """Listens to the target in a thread, and keeps what there is to see of the engine that is chosen."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.chosen = ""
        self._view: View | None = None
        self._thread = SupervisedThread("monitor top", "reader", self._turn, Supervisor(), within_s=TOP_LOOK_WITHIN_S)
        self.start = self._thread.start
        self.stop = self._thread.stop

    @property
    def view(self) -> View | None:
        """What there is to see now, or None before the first look."""
        self._thread.check()
        view, failure = self._view, self._thread.failure
        return view._replace(failure=failure) if view is not None and failure else view

    def _turn(self) -> float:
        try:
            failure = self.live.listen(LOOK_EVERY_S)
            self._view = self._look(failure)
        except (Unreachable, NotKnown) as error:
            if self._view is not None:
                self._view = self._view._replace(failure=str(error))
        return 0.0

    def _look(self, failure: str) -> View:
        query = self.live.query
        engines = query.engines()
        names = [view.engine for view in engines]
        engine = self.chosen if self.chosen in names else next(iter(names), "")
        streams = {view.engine for view in engines if view.signal == "stream"}
        requests = query.requests(engine) if engine in streams else []
        return View(engines, engine, requests, query.findings("firing"), failure)


class EventHistoryScreen(Screen[None]):
    """One request: its state, its wait, and its phases."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "app.pop_screen", "Back")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        """All of it, to be scrolled."""
        with VerticalScroll():
            yield Static(self.text, markup=False)
        yield Footer()


class Top(App[None]):
    """The screen of `monitor top`. It shows what `looker`, a thread that is already running, last saw."""

    CSS = """
    #engines, #findings { height: auto; }
    #above { height: auto; max-height: 40%; }
    #below { height: auto; max-height: 35%; }
    #sorted { height: 1; color: $text-muted; }
    DataTable { height: 1fr; min-height: 4; overflow-x: hidden; }
    DataTable, VerticalScroll { scrollbar-size-vertical: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "next_engine", "Engine"),
        Binding("s", "sort", "Sort"),
        Binding("enter", "history", "History", show=True, priority=False),
        Binding("q,ctrl+c", "quit", "Quit"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, looker: Looker) -> None:
        super().__init__()
        self.looker = looker
        self.sort = "blocks"
        self._shown: View | None = None
        # Kept, since a timer may still look for them while they are taken down.
        self._engines = Static("Listening …", id="engines", markup=False)
        self._sorted = Static(id="sorted", markup=False)
        self._table: DataTable[str] = DataTable(cell_padding=0, cursor_type="row")
        self._findings = Static(id="findings", markup=False)

    def compose(self) -> ComposeResult:
        """Engines above, requests, findings below."""
        with VerticalScroll(id="above", can_focus=False):
            yield self._engines
        yield self._sorted
        yield self._table
        with VerticalScroll(id="below", can_focus=False):
            yield self._findings
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        for name, width in top_text.COLUMNS:
            self._table.add_column(name, width=width, key=name)
        self._table.focus()
        self.set_interval(LOOK_EVERY_S, self.show)
        self.show()

    def show(self) -> None:
        """Show what was seen last, if that is new."""
        view = self.looker.view
        if view is None or view is self._shown:
            return
        self._shown = view
        self._engines.update(top_text.engines(view.engines, view.engine))
        self._findings.update(top_text.findings(view.findings, view.engine))
        self._show_requests(view)

    def _show_requests(self, view: View) -> None:
        requests = [request for request in view.requests if not request.ended]
        requests.sort(key=lambda request: (getattr(request, self.sort), request.blocks, request.for_s), reverse=True)
        caption = f"{len(requests):,} requests live or hold blocks, by {SORTS[self.sort]}"
        self._sorted.update(escaped(view.failure) or caption)
        table = self._table
        at = table.cursor_row
        chosen = self._chosen()
        table.clear()
        for request in requests:
            table.add_row(*top_text.row(request), key=f"#{request.number}")
        keys = [f"#{request.number}" for request in requests]
        table.move_cursor(row=keys.index(chosen) if chosen in keys else min(at, max(len(keys) - 1, 0)))

    def _chosen(self) -> str:
        """Return the request under the cursor, by its number, or an empty string if there is none."""
        table = self._table
        if not table.row_count:
            return ""
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value or ""

    def action_next_engine(self) -> None:
        """Select the next one, and the first after the last."""
        if self._shown is not None and self._shown.engines:
            names = [view.engine for view in self._shown.engines]
            self.looker.chosen = names[(names.index(self._shown.engine) + 1) % len(names)]

    def action_sort(self) -> None:
        """By the other figure."""
        self.sort = next(each for each in SORTS if each != self.sort)
        if self._shown is not None:
            self._show_requests(self._shown)

    async def on_data_table_row_selected(self, _event: DataTable.RowSelected) -> None:
        """Enter: the request's history."""
        name = self._chosen()
        if self._shown is None or not name:
            return
        try:
            detail = await asyncio.to_thread(self.looker.live.query.request, self._shown.engine, name)
        except (NotKnown, Unreachable) as error:
            self.notify(escaped(str(error)), severity="warning")
            return
        out = io.StringIO()
        explain_text.request(detail, terminal_console(file=out, width=WIDTH))
        await self.push_screen(EventHistoryScreen(out.getvalue()))
