"""Sessions of browsers end with time, and the oldest with too many."""

from __future__ import annotations

from kvscope.monitor.service.guard import BrowserSessions


def test_sessions_end() -> None:
    now = [100.0]
    sessions = BrowserSessions(seconds=10, most=2, clock_s=lambda: now[0])
    first, second = sessions.begin(), sessions.begin()
    assert sessions.left_s(first) == 10
    third = sessions.begin()  # one more than are kept: the oldest ends
    assert [sessions.left_s(each) > 0 for each in (first, second, third)] == [False, True, True]
    now[0] += 10
    assert sessions.left_s(second) == 0
    assert sessions.left_s("") == sessions.left_s("é") == 0
