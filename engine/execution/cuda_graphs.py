"""Decodes that are captured at the start, by batch size, and replayed: CUDA graphs.

A decode is many small kernels, and where few requests run, to launch them takes longer than to compute them. A graph
launches them at once, but only as they were captured: the same kernels over the same memory. So the inputs stay in one
place: a batch is copied into them, padded to the next captured size, and the graph of that size is replayed. Rows of
padding write to the reserved block, and their results are ignored.

Nothing in a captured step may look at a tensor's values from the host or take memory by them: the kernels choose by
shapes alone, and the inputs' block tables have the width of the longest sequence. Their twins do look at values, and so
on the CPU nothing is captured: the same function is called over the same inputs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ..blocks.block_pool import NULL_BLOCK
from ..models import ModelConfig
from .input_batch import Decodes, InGroup, InputBatch, Reach

MOST_CAPTURED: Final = 512
"""Requests of the largest decode that is captured, as in vLLM. Beyond, computing takes longer than launching."""

NULL_SLOT: Final = 0
"""The first slot of the reserved block, whatever the block size."""

Forward = Callable[[InputBatch], Tensor]


def sizes_up_to(most: int) -> list[int]:
    """Return the batch sizes to capture for decodes of up to `most` requests: 1, 2, 4, steps of 8, and the largest."""
    largest = min(most, MOST_CAPTURED)
    return [size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest] + [largest]


class DecodeGraphs:
    """`forward`, which gives a batch's hidden states [rows, hidden], for decodes of these `sizes`, ascending.

    `inputs_bytes` is what the inputs take, `captured_bytes` what each capture took besides, the largest size first: the
    others find most of what they need in the memory of those before them. Raises torch.OutOfMemoryError.
    """

    def __init__(
        self, forward: Forward, sizes: Sequence[int], model: ModelConfig, block_size: int, device: str
    ) -> None:
        inputs = static_inputs(sizes[-1], model, block_size, device)
        self.inputs_bytes = sum(tensor.nbytes for tensor, _ in _batch_tensors(inputs))
        self.captured_bytes: list[int] = []
        self._sizes = sizes
        self._inputs: dict[int, InputBatch] = {}
        self._replays: dict[int, Callable[[], Tensor]] = {}
        pool = torch.cuda.graph_pool_handle() if device != "cpu" else None
        console = Console(stderr=True)
        caption = "Capturing CUDA graphs (decode)"
        for size in track(sizes[::-1], caption, console=console, disable=not console.is_terminal):
            self._inputs[size] = _first_rows(inputs, size)
            run = partial(forward, self._inputs[size])
            if pool is not None:
                # First for real: a kernel that is compiled or a library that is loaded would break the capture.
                run()
            before = _free(device)
            self._replays[size] = _capture(run, pool)
            self.captured_bytes.append(max(before - _free(device), 0))

    @property
    def memory(self) -> int:
        """Bytes taken in all."""
        return self.inputs_bytes + sum(self.captured_bytes)

    def take(self, batch: InputBatch) -> bool:
        """Whether `replay` can: all are decodes, and no more than were captured."""
        only_decodes = all(not reach.chunks and reach.prefills is None for _, reach in batch.groups)
        return only_decodes and len(batch.token_ids) <= self._sizes[-1]

    def replay(self, batch: InputBatch) -> Tensor:
        """Return the batch's hidden states, and rows of padding after them. They last until the next replay."""
        size = self._sizes[bisect_left(self._sizes, len(batch.token_ids))]
        _fill(self._inputs[size], batch)
        return self._replays[size]()


def _capture(run: Callable[[], Tensor], pool: Any) -> Callable[[], Tensor]:
    """Return a function that repeats `run`, in the memory of the graphs' `pool`, or `run` itself where that is None."""
    if pool is None:
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        hidden = run()

    def replay() -> Tensor:
        graph.replay()
        return hidden

    return replay


def _free(device: str) -> int:
    """Return the bytes that the device has free, torch's cache included, which do not matter where nothing is
    captured.
    """
    if device == "cpu":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def static_inputs(size: int, model: ModelConfig, block_size: int, device: str) -> InputBatch:
    """Return a batch of `size` rows of padding, with room for the longest sequences."""

    def rows(*shape: int, value: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full((size, *shape), value, dtype=dtype, device=device)

    def group(window: int | None) -> InGroup:
        longest = model.max_model_len
        # The window may begin with the last token of a block.
        tokens = longest if window is None else min(window + block_size - 1, longest)
        tables = rows(-(-tokens // block_size), value=NULL_BLOCK, dtype=torch.int32)
        decodes = Decodes(tables, rows(value=1))
        return InGroup(rows(value=NULL_SLOT), Reach(decodes, [], None))

    return InputBatch(
        token_ids=rows(value=0),
        carried=None,
        positions=rows(value=0),
        groups=[group(window) for window, _ in model.kv_groups],
        sampling=None,
    )


def _first_rows(batch: InputBatch, size: int) -> InputBatch:
    """Return the same memory, as a batch of `size` rows."""

    def cut(group: InGroup) -> InGroup:
        assert group.reach.decodes is not None
        decodes = Decodes(*(tensor[:size] for tensor in group.reach.decodes))
        return InGroup(group.slots[:size], group.reach._replace(decodes=decodes))

    return batch._replace(
        token_ids=batch.token_ids[:size],
        positions=batch.positions[:size],
        groups=[cut(group) for group in batch.groups],
    )


def _batch_tensors(batch: InputBatch) -> list[tuple[Tensor, int]]:
    """Return the tensors that decodes are computed from, and the value of each in a row of padding."""
    tensors = [(batch.token_ids, 0), (batch.positions, 0)]
    for slots, reach in batch.groups:
        assert reach.decodes is not None
        tensors += [(slots, NULL_SLOT), (reach.decodes.block_tables, NULL_BLOCK), (reach.decodes.seq_lens, 1)]
    return tensors


def _fill(inputs: InputBatch, batch: InputBatch) -> None:
    """Copy the batch into the first rows, and make padding of the others.

    Old entries stay in tables beyond the batch's width, where none of its sequences sees anything.
    """
    for (static, padding), (given, _) in zip(_batch_tensors(inputs), _batch_tensors(batch), strict=True):
        rows = len(given)
        if given.dim() == 2:
            static = static[:, : given.shape[1]]
        static[:rows].copy_(given)
        static[rows:].fill_(padding)
