"""The real model with something that happens before each step: it waits, or it fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from torch import Tensor

from kvscope.engine.models import LoadedModel
from kvscope.engine.models.layers import Attend, Model


class Before:
    """`model`, calling `before` at the beginning of each step."""

    def __init__(self, model: Model, before: Callable[[], object]) -> None:
        self.model = model
        self.config = model.config
        self.before = before

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self.before()
        return self.model.forward(token_ids, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def weights(self) -> Iterator[Tensor]:
        return self.model.weights()


def with_before(loaded: LoadedModel, before: Callable[[], object]) -> LoadedModel:
    return dataclasses.replace(loaded, module=Before(loaded.module, before))
