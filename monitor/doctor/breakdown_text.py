"""A partial memory breakdown at a terminal: each term as stated, as it follows, or with its bounds."""

from __future__ import annotations

from rich.console import Console

from kvscope.monitor.analysis.partial_breakdown import MemoryTerm
from kvscope.monitor.doctor.terminal import put_line, wrapped
from kvscope.monitor.planning.plan_types import GIB_BYTES


def show_terms(terms: list[MemoryTerm], console: Console) -> None:
    """Print a line for each term of a breakdown that is not whole."""
    if not terms:
        return
    put_line(console, "BREAKDOWN, as far as the text states it", "bold")
    for term in terms:
        put_line(console, f"  {term.name:<24} {_term_size(term):<28} {term.state}")


def show_accounting(graphs_counted: str, contradictions: list[str], console: Console) -> None:
    """Print how graphs are counted, and the engine's sizes that contradict each other."""
    if graphs_counted:
        wrapped(console, f"Graphs: {graphs_counted}.", "  ")
    for one in contradictions:
        wrapped(console, f"{one[0].upper()}{one[1:]}.", "  ! ", "bold red")


def _term_size(term: MemoryTerm) -> str:
    if term.state == "stated":
        return f"{(term.low + (term.high or term.low)) / 2 / GIB_BYTES:>8.2f} GiB"
    if term.high is None:
        return f"at least {term.low / GIB_BYTES:.2f} GiB" if term.low else "not bounded"
    if term.state == "follows":
        return f"{(term.low + term.high) / 2 / GIB_BYTES:>8.2f} GiB"
    return f"{term.low / GIB_BYTES:.2f} to {term.high / GIB_BYTES:.2f} GiB"
