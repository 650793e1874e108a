"""A step's plan as tensors: which token of which request stands in which row, and where its keys and values go."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvscope.kernels import run_on

from ..models import ModelConfig
from ..requests.request import PromptLogprobs
from ..scheduling.scheduler_state import SchedulerOutput
from .sampler import SamplingBatch, lay_out_sampling
from .upload import Upload

UNKNOWN_TOKEN: Final = 0
"""Stands where the step before is still to sample."""


class Decodes(NamedTuple):
    """Requests with one token each: the first rows of the batch, one a request."""

    block_tables: Tensor
    """[requests, blocks]"""
    seq_lens: Tensor
    """[requests]: tokens in those blocks, this one included."""


class Chunks(NamedTuple):
    """Requests with about as many tokens as one another, padded to the longest, L."""

    rows: Tensor
    """[requests * L]: the row of each token. Padding repeats a request's last."""
    kept: Tensor
    """[rows]: where, among `rows`, the tokens are that are no padding."""
    block_tables: Tensor
    """[requests, blocks]"""
    visible: Tensor
    """[requests, 1, L, blocks * block_size]: whether a token sees a slot."""


class Prefills(NamedTuple):
    """Requests with several tokens each, for the kernel: all of them, unpadded."""

    first_row: int
    block_tables: Tensor
    """[requests, blocks]"""
    starts: Tensor
    """[requests + 1]: where each request's rows begin, counted from `first_row`, and the last one's end."""
    seq_lens: Tensor
    """[requests]: tokens in those blocks, these included."""
    longest: int


class Reach(NamedTuple):
    """The blocks that the batch's rows read in a layer. Blocks that a sliding window has left behind are not in these
    tables.

    Shares longer than a decode are in `prefills` where the kernels run, and else in `chunks`.
    """

    decodes: Decodes | None
    chunks: list[Chunks]
    prefills: Prefills | None


class InGroup(NamedTuple):
    """The blocks of one KV group that a step writes and reads."""

    slots: Tensor
    """block * block_size + offset of each row's keys and values."""
    reach: Reach


class PromptRows(NamedTuple):
    """Rows of one prompt from which the likelihood of its tokens is computed: each row's is that of the token after."""

    first_row: int
    token_ids: list[int]
    """The tokens after, of as many rows."""
    likeliest: int
    """How many of the likeliest are reported beside them."""
    into: PromptLogprobs
    place: int
    """Where in `into` the first of them belongs."""


class InputBatch(NamedTuple):
    """One row a token: decodes first, then chunks by length."""

    token_ids: Tensor
    carried: tuple[Tensor, Tensor] | None
    """Rows whose token the step before is still to choose, and its place among those. None: there are no such rows."""
    positions: Tensor
    groups: list[InGroup]
    """By the model's KV groups."""
    sampling: SamplingBatch | None
    """Requests whose next token is to be chosen, in the order of the plan. None: no request's is."""
    prompts: Sequence[PromptRows] = ()


class _TokenRange(NamedTuple):
    """Consecutive tokens of a sequence and the blocks it lies in."""

    start: int
    num_tokens: int
    table: Sequence[int]
    table_row: int
    behind: int = 0
    """Blocks that the sequence's window has left, of which `start` does not count the tokens."""


class _KnownTables:
    """A request's row on the device, and how many blocks of its tables are written there."""

    def __init__(self, row: int, tables: Sequence[Sequence[int]]) -> None:
        self.row = row
        self.tables = tables
        self.written = 0


class BlockTables:
    """The requests' block tables on the device, in int32: [groups, rows, blocks]. A step writes only what is new.

    Tables grow, and entries that a window has left may change, which nobody reads again. A request that is preempted
    gets new ones. Entries behind a table's end are blocks that exist, whosever they are.
    """

    def __init__(self, groups: int, blocks: int, device: str) -> None:
        self._tables = torch.zeros((groups, 0, blocks), dtype=torch.int32, device=device)
        self._known: dict[int, _KnownTables] = {}
        self._free: list[int] = []

    def forget(self) -> None:
        """Write everything anew: a step may have failed before its entries were written."""
        self._free += [known.row for known in self._known.values()]
        self._known.clear()

    def lay_out(
        self, numbers: Sequence[int], tables: Mapping[int, Sequence[Sequence[int]]], upload: Upload
    ) -> tuple[dict[int, int], Callable[[Tensor], None]]:
        """Add to the upload what is new in the tables of these requests. Return each one's row, and what writes it."""
        self._make_room(numbers)
        _, rows, blocks = self._tables.shape
        places, entries = array("q"), array("q")
        for number in numbers:
            known = self._known.get(number)
            if known is None or known.tables is not tables[number]:
                row = self._free.pop() if known is None else known.row
                known = self._known[number] = _KnownTables(row, tables[number])
            end = min(len(known.tables[0]), blocks)
            if known.written < end:
                for group, table in enumerate(known.tables):
                    first = (group * rows + known.row) * blocks
                    places.extend(range(first + known.written, first + end))
                    entries.extend(table[known.written : end])
                known.written = end
        at_places, at_entries = upload.ints(places), upload.ints(entries)

        def write(sent: Tensor) -> None:
            if places:
                self._tables.view(-1).index_copy_(0, at_places(sent), at_entries(sent).int())

        return {number: self._known[number].row for number in numbers}, write

    def _make_room(self, numbers: Sequence[int]) -> None:
        """Have a free row for each of them that has none: of requests that are not among them, or new ones."""
        missing = sum(number not in self._known for number in numbers)
        if missing > len(self._free):
            for number in self._known.keys() - set(numbers):
                self._free.append(self._known.pop(number).row)
        if missing > len(self._free):
            groups, rows, blocks = self._tables.shape
            added = max(missing - len(self._free), rows)
            self._tables = torch.cat([self._tables, self._tables.new_zeros((groups, added, blocks))], 1)
            self._free += range(rows, rows + added)

    def of(self, group: int, rows: Tensor, behind: Tensor | None, width: int) -> Tensor:
        """Return [requests, width]: tables of a group from the block on that is `behind` each request's window."""
        tables = self._tables[group]
        if behind is None:
            return tables[:, :width].index_select(0, rows)
        places = behind[:, None] + torch.arange(width, device=rows.device)
        return tables[rows[:, None], places.clamp_(max=tables.shape[1] - 1)]


class StepLayout:
    """Makes batches of plans for a model, on its device.

    `seed` is what requests without a seed of their own draw from.
    """

    def __init__(self, model: ModelConfig, block_size: int, device: str, seed: int) -> None:
        self._model = model
        self._windows = [group.window for group in model.kv_groups]
        self._block_size = block_size
        self._device = device
        self._seed = seed
        self._tables = BlockTables(len(self._windows), -(-model.max_model_len // block_size), device)
        self._chosen: dict[int, int] = {}
        """Where the batch before chooses each request's token."""

    def lay_out(self, plan: SchedulerOutput, tables: Mapping[int, Sequence[Sequence[int]]]) -> InputBatch:
        """Return the plan's tokens as a batch on the device, where they come in one copy.

        tables: of each request, by its number, a block table for each KV group, that grows while the request has it.
        """
        before, self._chosen = self._chosen, {}
        try:
            batch = self._lay_out(plan, tables, before)
        except BaseException:
            self._tables.forget()
            raise
        if batch.sampling is not None:
            self._chosen = {number: place for place, number in enumerate(batch.sampling.numbers)}
        return batch

    def _lay_out(
        self, plan: SchedulerOutput, tables: Mapping[int, Sequence[Sequence[int]]], before: Mapping[int, int]
    ) -> InputBatch:
        upload = Upload()
        # Chunks of one bit length are padded to the longest: to twice their own at most. Neighbours see equally far.
        by_length = sorted(plan.shares, key=lambda share: ((share.num_tokens - 1).bit_length(), share.start))
        token_ids: list[int] = []
        carried: dict[int, int] = {}
        unknown: dict[int, int] = {}
        positions: list[int] = []
        last_rows: dict[int, int] = {}
        prompts: list[PromptRows] = []
        for request, start, count, *_ in by_length:
            if request.prompt_logprobs is not None and start < request.num_prompt_tokens - 1:
                after = request.token_ids[start + 1 : min(start + count + 1, request.num_prompt_tokens)]
                asked = request.params.prompt_logprobs or 0
                prompts.append(PromptRows(len(token_ids), after, asked, request.prompt_logprobs, start + 1))
            known = request.token_ids[start : start + count]
            if len(known) < count:
                known.append(UNKNOWN_TOKEN)
                if request.number in before:
                    unknown[request.number] = before[request.number]
                    carried[len(token_ids) + count - 1] = before[request.number]
            token_ids += known
            positions += range(start, start + count)
            last_rows[request.number] = len(token_ids) - 1
        rows, write_tables = self._tables.lay_out([s.request.number for s in by_length], tables, upload)
        ranges = [
            [
                _TokenRange(s.start, s.num_tokens, tables[s.request.number][group], rows[s.request.number])
                for s in by_length
            ]
            for group in range(len(self._windows))
        ]
        groups = [self._in_group(group, of_group, upload) for group, of_group in enumerate(ranges)]
        sampled = [share.request for share in plan.shares if share.samples]
        sampling = lay_out_sampling(
            sampled,
            [last_rows[request.number] for request in sampled],
            self._seed,
            self._model.eos_token_ids,
            self._model.vocab_size,
            upload,
            unknown,
        )
        at_tokens, at_positions = upload.ints(token_ids), upload.ints(positions)
        at_carried, carried_from = upload.ints(list(carried)), upload.ints(list(carried.values()))
        sent = upload.send(self._device)
        write_tables(sent)
        return InputBatch(
            at_tokens(sent),
            (at_carried(sent), carried_from(sent)) if carried else None,
            at_positions(sent),
            [group(sent) for group in groups],
            sampling(sent) if sampled else None,
            prompts,
        )

    def _in_group(self, group: int, by_length: list[_TokenRange], upload: Upload) -> Callable[[Tensor], InGroup]:
        size = self._block_size
        slots = array("q")
        for start, count, table, *_ in by_length:
            slots.extend([table[at // size] * size + at % size for at in range(start, start + count)])
        at_slots, reach = upload.ints(slots), self._reach(group, by_length, upload)
        return lambda sent: InGroup(at_slots(sent), reach(sent))

    def _reach(self, group: int, by_length: list[_TokenRange], upload: Upload) -> Callable[[Tensor], Reach]:
        decodes: Callable[[Tensor], Decodes] | None = None
        chunks: list[Callable[[Tensor], Chunks]] = []
        longer: list[_TokenRange] = []
        first_row = 0
        for bits, alike in groupby(by_length, key=lambda share: (share.num_tokens - 1).bit_length()):
            members = [self._within_window(group, share) for share in alike]
            if bits == 0:
                decodes = self._decodes(group, members, upload)
            elif run_on(self._device):
                longer += members
            else:
                chunks.append(self._chunks(group, members, first_row, upload))
            first_row += sum(share.num_tokens for share in members)
        prefills = self._prefills(group, longer, len(by_length) - len(longer), upload) if longer else None
        return lambda sent: Reach(
            decodes and decodes(sent), [chunk(sent) for chunk in chunks], prefills and prefills(sent)
        )

    def _within_window(self, group: int, share: _TokenRange) -> _TokenRange:
        """Return the same as if the sequence began with the first block that a window of its tokens reaches."""
        window = self._windows[group]
        behind = 0 if window is None else max(0, share.start + 1 - window) // self._block_size
        return share._replace(start=share.start - behind * self._block_size, behind=behind)

    def _decodes(self, group: int, members: list[_TokenRange], upload: Upload) -> Callable[[Tensor], Decodes]:
        tables = self._padded_tables(group, members, upload)
        lens = upload.ints([share.start + 1 for share in members])
        return lambda sent: Decodes(tables(sent), lens(sent))

    def _prefills(
        self, group: int, members: list[_TokenRange], first_row: int, upload: Upload
    ) -> Callable[[Tensor], Prefills]:
        counts = [share.num_tokens for share in members]
        tables = self._padded_tables(group, members, upload)
        starts = upload.ints([0, *accumulate(counts)])
        seq_lens = upload.ints([share.start + share.num_tokens for share in members])
        return lambda sent: Prefills(first_row, tables(sent), starts(sent), seq_lens(sent), max(counts))

    def _chunks(
        self, group: int, members: list[_TokenRange], first_row: int, upload: Upload
    ) -> Callable[[Tensor], Chunks]:
        longest = max(share.num_tokens for share in members)
        rows: list[int] = []
        kept: list[int] = []
        seen: list[int] = []
        for index, share in enumerate(members):
            padding = longest - share.num_tokens
            kept += range(index * longest, index * longest + share.num_tokens)
            rows += [*range(first_row, first_row + share.num_tokens), *[first_row + share.num_tokens - 1] * padding]
            last = share.start + share.num_tokens - 1
            seen += [*range(share.start, last + 1), *[last] * padding]
            first_row += share.num_tokens
        tables = self._padded_tables(group, members, upload)
        at_rows, at_kept, at_seen = upload.ints(rows), upload.ints(kept), upload.ints(seen)
        window = self._windows[group]

        def chunks(sent: Tensor) -> Chunks:
            block_tables = tables(sent)
            slots = torch.arange(block_tables.shape[1] * self._block_size, device=sent.device)
            positions = at_seen(sent).view(len(members), 1, longest, 1)
            visible = slots <= positions
            if window is not None:
                visible &= slots > positions - window
            return Chunks(at_rows(sent), at_kept(sent), block_tables, visible)

        return chunks

    def _padded_tables(self, group: int, members: list[_TokenRange], upload: Upload) -> Callable[[Tensor], Tensor]:
        """Return [requests, blocks], as many blocks as the longest sequence fills."""
        width = max(-(-(share.start + share.num_tokens) // self._block_size) for share in members)
        rows = upload.ints([share.table_row for share in members])
        behind = upload.ints([share.behind for share in members]) if self._windows[group] is not None else None
        return lambda sent: self._tables.of(group, rows(sent), behind and behind(sent), width)
