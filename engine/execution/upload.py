"""The numbers of a step, brought to the device in one copy that the host does not wait for."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SentPart = Callable[[Tensor], Tensor]
"""Maps what `Upload.send` returned to the numbers that were added together."""


class Upload:
    """Numbers to send together. All take eight bytes, so that each part can be a view of one tensor."""

    def __init__(self) -> None:
        self._values = array("q")

    def ints(self, values: Sequence[int]) -> SentPart:
        """Add int64 numbers, and return how to find them on the device."""
        first = len(self._values)
        self._values.extend(values if isinstance(values, array) else array("q", values))
        part = slice(first, len(self._values))
        return lambda sent: sent[part]

    def floats(self, values: Sequence[float]) -> SentPart:
        """Add float64 numbers, and return how to find them on the device."""
        bits = array("q")
        bits.frombytes(array("d", values).tobytes())
        view = self.ints(bits)
        return lambda sent: view(sent).view(torch.float64)

    def send(self, device: str) -> Tensor:
        """Return all numbers on the device. A GPU copies them from pinned memory, in the order of its stream."""
        host = torch.frombuffer(self._values, dtype=torch.int64)
        return host.pin_memory().to(device, non_blocking=True) if device.startswith("cuda") else host
