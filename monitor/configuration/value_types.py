"""Texts that stand for numbers, ports, lengths of time and sizes. All raise argparse.ArgumentTypeError."""

from __future__ import annotations

import argparse
import re

from kvscope.monitor.detectors.judgement import VERDICTS, Verdict
from kvscope.monitor.sources.prometheus_history import seconds


def positive(text: str) -> float:
    """Parse a number above 0, of seconds or days."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def port(text: str) -> int:
    """Parse a port to listen on. 0 is any free port."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: give a number up to 65535, or 0 for any that is free")
    return int(text)


def length(text: str) -> int:
    """Parse a length of time such as 30m, in seconds."""
    try:
        return seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size(text: str) -> int:
    """Parse a number of bytes such as 500M or 2G (of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not a size: write 500M or 2G")
    return round(float(match[1]) * 1024.0 ** " KMGT".index(match[2] or " "))


def length_or_never(text: str) -> int:
    """Parse a length of time in seconds, 0 for never."""
    return 0 if text == "0" else length(text)


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return value


def verdict(text: str) -> Verdict:
    """Parse a verdict."""
    for known in VERDICTS:
        if text == known:
            return known
    raise argparse.ArgumentTypeError(f"{text} is not a verdict: choose from {', '.join(VERDICTS)}")
