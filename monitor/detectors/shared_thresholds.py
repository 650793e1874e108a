"""Thresholds that detectors of several families compare with. The class that has one as an attribute names it.

Those of paces, of preemptions and of lost references are beside the functions that compare with them.
"""

from __future__ import annotations

from typing import Final

from .detector import Threshold

LONGEST_TIMES: Final = Threshold(
    3, "times", "a step that cannot be compared with earlier ones may take as much longer than the longest"
)
LEAST_SCRAPES: Final = Threshold(
    5, "scrapes", "where only metrics are known, one gap between two samples may be one step, or its end missed"
)
MOST_ELSEWHERE: Final = Threshold(
    0.1, "of the device", "what a CUDA context and a display take beside the engine is less"
)
