"""The functions of some folders that a piece of code calls. It needs only the standard library."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


class CalledFunctions:
    """Functions of `folders` that were called while they were noted."""

    def __init__(self, folders: tuple[str, ...]) -> None:
        self.folders = folders
        self._called: set[CodeType] = set()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Forget those before, and note what this thread and those that it starts call."""
        self._called.clear()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            self._called.add(frame.f_code)

    def places(self) -> list[str]:
        """Return the places of those that were noted last."""
        return [
            place_of(code) for code in list(self._called) if any(folder in code.co_filename for folder in self.folders)
        ]


def place_of(code: CodeType) -> str:
    """Name a function by its file's real path and first line."""
    return f"{Path(code.co_filename).resolve()}:{code.co_firstlineno}"
