"""Receivers that run for a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.outputs.otel.receiver import GrpcReceiver, HttpReceiver, Receiver, receiving


@pytest.fixture(scope="module", autouse=True)
def what_grpc_keeps_open() -> Iterator[None]:
    """The poller that it has for the process as long as it is used, and closes some time after."""
    with receiving(GrpcReceiver):
        yield


@pytest.fixture(params=[HttpReceiver, GrpcReceiver])
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with receiving(request.param) as running:
        yield running


@pytest.fixture
def over_http() -> Iterator[Receiver]:
    with receiving(HttpReceiver) as running:
        yield running
