"""The process that has imported vLLM, for the tests of vLLM in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.probes.forked_vllm import ForkedVllm


@pytest.fixture(scope="session")
def forked_vllm() -> Iterator[ForkedVllm]:
    forked = ForkedVllm(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_PLUGINS="")
    yield forked
    forked.close()
