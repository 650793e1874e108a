"""Every exception that kvscope raises on purpose. Each message names the problem and the remedy.

KvscopeError
├── BadTarget        the target is nothing that kvscope can open
├── BadQuestion      the question makes no sense (also a ValueError)
│   └── BadTime      the text names no time and no stream position
├── NotKnown         there is no such engine, request, block, finding or time (also a LookupError)
├── CannotTell       the target cannot be read, or lacks the signal that is needed
├── Unreachable      the kvscope service does not answer
└── ContractError    the bytes do not follow the event contract

Catch KvscopeError to catch all of them. Rooms derive their own exceptions from it. Any other exception is a defect.
"""

from __future__ import annotations

from collections.abc import Sequence


class KvscopeError(Exception):
    """The base of all exceptions that kvscope raises on purpose."""


class BadTarget(KvscopeError):
    """The target cannot be opened. The message lists what kvscope can open."""


class BadQuestion(KvscopeError, ValueError):
    """The question makes no sense. The message gives the reason."""


class BadTime(BadQuestion):
    """The text names no time and no stream position. The message shows what one looks like."""


class NotKnown(KvscopeError, LookupError):
    """The engine, request, block, finding or time does not exist. The message lists those that exist."""


class CannotTell(KvscopeError):
    """The target cannot be read, or lacks the signal that is needed. The message names what is missing.

    notes: what is known about the target all the same.
    """

    def __init__(self, message: str, notes: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.notes = list(notes)


class Unreachable(KvscopeError):
    """The service does not answer, or not as a kvscope service does. The message names the remedy."""


class ContractError(KvscopeError):
    """The bytes do not follow the event contract, or follow a newer major version of it."""
