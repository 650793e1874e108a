"""Every state, cause, release and limit that the page can show has words."""

from __future__ import annotations

from enum import IntEnum

import pytest

from kvscope.monitor.base.text import WORDS, in_words
from kvscope.monitor.contract.kinds import Cause, Limit, Release, Status


@pytest.mark.parametrize("kind", [Status, Cause, Release, Limit])
def test_every_name_has_words(kind: type[IntEnum]) -> None:
    assert [member.name for member in kind if member.name not in WORDS] == []


def test_a_name_that_came_later_is_readable() -> None:
    assert in_words("WAITING_FOR_MOON") == "waiting for moon"
