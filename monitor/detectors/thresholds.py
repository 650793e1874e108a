"""Thresholds: the numbers that detectors compare with, and the values in force."""

from __future__ import annotations

from collections.abc import Mapping


class Threshold:
    """A number that a detector compares with: its default, its unit, and the reason for the default.

    An attribute of the detector that it belongs to, which gives it its name: `leak.finished-held.grace_s`, as `--set
    CODE.NAME=VALUE` takes it. Several detectors' shared code may hold the object. One class owns it.
    """

    def __init__(self, value: float, unit: str, reason: str) -> None:
        self.value = value
        self.unit = unit
        self.reason = reason
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        """Take the name from the class and the attribute."""
        self.name = f"{getattr(owner, 'code', '')}.{name}"

    def __repr__(self) -> str:
        return f"{self.name}={self.value:g} {self.unit}"


class Settings:
    """The thresholds in force: every threshold's default, and the values that were set instead, by full name."""

    def __init__(self, changed: Mapping[str, float] | None = None) -> None:
        self._changed = dict(changed or {})

    def __call__(self, threshold: Threshold) -> float:
        """Return the value in force."""
        return self._changed.get(threshold.name, threshold.value)
