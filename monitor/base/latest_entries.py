"""A dictionary of the latest entries alone: a cache, or what was seen of senders who may have any number of names."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class LatestEntries(OrderedDict[Key, Value]):
    """The `most` entries that were set last, the latest at the end. `move_to_end` when one is read keeps it longer."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        """Set an entry, and drop the oldest beyond the bound."""
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)
