"""Numbers, times and the wire's names in words that a tired person reads without effort. Times are UTC."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
"""Control characters of ASCII and C1, line and paragraph separators, characters of no width, and those that change the
direction of text: a terminal obeys some, and others make text look like another."""
_UNPRINTABLE_IN_JSON: Final = re.compile(_UNPRINTABLE.pattern.replace("\x00-\x1f", ""))
_UNPRINTABLE_BUT_LINES: Final = re.compile(_UNPRINTABLE.pattern.replace("\x00-\x1f", "\x00-\x09\x0b-\x1f"))


def install_hint(extra: str = "") -> str:
    """Return the command that installs kvscope with an extra. It names a file: no index has kvscope."""
    return f"pip install 'PATH{f'[{extra}]' if extra else ''}', where PATH is kvscope's wheel or checkout"


def clock_time(wall_ns: int) -> str:
    """Return a wall time as `14:02:11`, or `an unknown time` for 0."""
    if not wall_ns:
        return "an unknown time"
    return datetime.fromtimestamp(wall_ns / 1e9, UTC).strftime("%H:%M:%S")


def timestamp(wall_ns: int) -> str | None:
    """Return a wall time by RFC 3339 with milliseconds, or None for 0."""
    if not wall_ns:
        return None
    return datetime.fromtimestamp(wall_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment(text: str, near_ns: int) -> int:
    """Return a time as wall ns: by RFC 3339, or the last `14:02:11` (or `14:02:11.5`, UTC) until `near_ns`.

    Raises ValueError for what is not a time.
    """
    try:
        if not re.fullmatch(r"\d{1,2}:\d\d(:\d\d([.,]\d+)?)?", text):
            at = datetime.fromisoformat(text)
            return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1e6) * 1000
        near = datetime.fromtimestamp(near_ns / 1e9, UTC)
        hours, minutes, seconds = (*text.replace(",", ".").split(":"), "0")[:3]
        midnight = near.replace(hour=0, minute=0, second=0, microsecond=0)
        at = midnight.replace(hour=int(hours), minute=int(minutes)) + timedelta(seconds=float(seconds))
        return round((at if at <= near else at - timedelta(days=1)).timestamp() * 1e6) * 1000
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a time: give 14:02:11 (UTC) or 2026-01-31T14:02:11Z") from None


def duration(seconds: float) -> str:
    """How long: `20 ms`, `0.4 s`, `31 s`, `12 min`, `3 h 10 min`, `2 d 4 h`."""
    if 0 < seconds < 0.0995:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 9.95e-4 else "1 ms"
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 block`, `2,048 blocks`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[object], most: int = 3) -> str:
    """Return `a, b and c`, or `a, b, c and 12 more`."""
    words = [str(name) for name in names]
    if len(words) > most:
        words = [*words[:most], f"{len(words) - most} more"]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "none"


def cut(text: str, most: int) -> str:
    """Return the text, or its beginning with an ellipsis if it has more characters than that."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def percent(share: float) -> str:
    """Return a share of 1 as `97.3 %`, never 0.0 % or 100.0 % unless it is."""
    text = f"{share * 100:.1f} %"
    if text == "0.0 %" and share > 0:
        return "< 0.1 %"
    if text == "100.0 %" and share < 1:
        return "> 99.9 %"
    return text


def number_in(text: str) -> int | float | str:
    """Return a number as printed, thousands separators and all. Other text stays text."""
    digits = text.replace(",", "")
    for kind in (int, float):
        try:
            return kind(digits)
        except ValueError:
            continue
    return text


def escaped(text: str) -> str:
    """Text from elsewhere for a line of a terminal or a log: characters that a terminal obeys become `\\x1b`, `\\n`."""
    return _UNPRINTABLE.sub(_python_escape, text)


def escaped_lines(text: str) -> str:
    """Return the same for text of several lines."""
    return _UNPRINTABLE_BUT_LINES.sub(_python_escape, text)


def escaped_json(text: str) -> str:
    """JSON for a terminal. Its encoder escapes control characters of ASCII alone, and the value remains the same."""
    return _UNPRINTABLE_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _python_escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()


WORDS: Final = {
    # states of a request
    "RECEIVED": "received",
    "WAITING": "waiting",
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": "waiting for its grammar",
    "WAITING_FOR_REMOTE_KVS": "waiting for remote KV",
    "WAITING_FOR_STREAMING_REQ": "waiting for streamed input",
    "RUNNING": "running",
    "FINISHED_STOPPED": "finished",
    "FINISHED_LENGTH_CAPPED": "finished (length)",
    "FINISHED_ABORTED": "aborted",
    "FINISHED_IGNORED": "ignored",
    "FINISHED_ERROR": "failed",
    "FINISHED_REPETITION": "finished (repetition)",
    # why a request is where it is
    "NEW": "new",
    "KV_BLOCKS": "for KV blocks",
    "MAX_NUM_SEQS": "for a place in the batch",
    "TOKEN_BUDGET": "for token budget",
    "BEHIND_HEAD": "behind the first",
    "PREEMPTED": "preempted",
    "ENCODER": "for the encoder",
    "REMOTE_KV": "for remote KV",
    "GRAMMAR": "for a grammar",
    "STREAMING_INPUT": "for streamed input",
    "PAUSED": "engine paused",
    "ZERO_TOKENS": "scheduled with no token",
    "PREEMPTION_IN_STEP": "preempted in this step",
    "STEP_IN_FLIGHT": "step in flight",
    "UNKNOWN": "reason unknown",
    "LORA": "for a LoRA slot",
    "CONNECTOR": "for the KV connector",
    "CAPACITY": "for capacity",
    "DEFERRED": "deferred",
    "FREE_DEFERRED": "kept for a transfer",
    "UNACCOUNTED": "UNACCOUNTED",
    # why a reference was released
    "FINISHED": "finished",
    "ABORTED": "aborted",
    "OUT_OF_WINDOW": "out of the attention window",
    "ROLLED_BACK": "rolled back",
    "RESET": "reset",
    "TRANSFER_DONE": "after a transfer",
    "LEASE_EXPIRED": "lease expired",
    "ERROR": "error",
    # what kept a step from being larger
    "NONE": "nothing",
    "KV": "KV blocks",
    "TOKENS": "max_num_batched_tokens",
    "SEQUENCES": "max_num_seqs",
}


def in_words(name: str) -> str:
    """Return a name of the wire in plain words, or in lower case if it is not known."""
    return WORDS.get(name, name.lower().replace("_", " "))
