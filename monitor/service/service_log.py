"""The service's log on stderr: one line for each record, whatever names and texts from elsewhere stand in it."""

from __future__ import annotations

import logging
import textwrap

from kvscope.monitor.text import escaped, escaped_lines


class LineFormatter(logging.Formatter):
    """Shows control characters and line breaks of a message as escapes, and indents the lines of a traceback.

    A line that begins without a space is a record of its own.
    """

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """Format the line of a record."""
        return escaped(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """Format a record with its traceback."""
        line, *rest = super().format(record).split("\n")
        return "\n".join([line, *(textwrap.indent(escaped_lines(each), "  ") for each in rest)])


def log_to_stderr() -> None:
    """Send the log of this process to stderr, from WARNING on."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
