"""The process of vLLM's Python that the lab's tests on vLLM share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvscope.lab.on_vllm.vllm_worker import VLLM_PYTHON, VllmWorker, shared_worker
from kvscope.lab.vllm_python import PYTHON


@pytest.fixture(scope="module")
def worker() -> Iterator[VllmWorker]:
    """The process of vLLM's Python: it takes ten seconds to start."""
    os.environ[VLLM_PYTHON] = PYTHON
    yield shared_worker()
    shared_worker().close()
    shared_worker.cache_clear()
    del os.environ[VLLM_PYTHON]
