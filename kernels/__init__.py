"""GPU kernels in Triton, each beside a plain torch twin that gives the same on any device.

The paged cache of a layer, in which H / K query heads share a key-value head:

    key_cache      [blocks, block_size, K, D]          K key-value heads of size D
    value_cache    the same
    block_tables   [B, M] int32                        a sequence's blocks in order; where it sees none, any block
    seq_lens       [B] int64, 1 to M * block_size      tokens of each sequence, those of this step included
    window         of tokens that each token sees, itself the last of them; None: all up to itself

`kv_write` keeps this step's keys and values, [N, K, D] each, in the caches' slots:

    slots          [N] int64                           block * block_size + offset, no slot twice

`paged_decode` is the attention of each sequence's last token, `paged_prefill` that of each sequence's last tokens, as
many as it has rows. Both read keys and values from the caches, this step's too:

    query          [B, H, D] or [N, H, D]              the rows of a sequence one after another
    query_starts   [B + 1] int64                       where each sequence's rows begin, and the last one's end
    result         as the query

`rms_norm` divides rows by their root mean square and multiplies them with a weight. Rows are hidden states or, each on
its own, heads. A `delta` is added to the rows first, which keep the sum:

    hidden, delta          [N, size] or [N, heads, size]
    weight                 [size]
    result                 as the hidden states; in `out` if given, which may be the hidden states themselves

`rotary` turns heads by their tokens' positions, in place:

    heads                  [N, heads, D]               of queries and keys
    turns                  [N, 2, D]                   cosines and sines, twice the D / 2, the first sines negated

Rows of query, key, value, hidden states and heads may be apart. Within one, heads are contiguous.

kv_write.py, paged_decode.py, …                    the kernels; importing them needs Triton
tiles.py                                           what the attention kernels share
kv_write_twin.py, paged_decode_twin.py, …          their twins, and the gathering of pages that these begin with
"""

from __future__ import annotations

import os


def run_on(device: str) -> bool:
    """Whether the kernels run on tensors of this device: on a GPU, and on any device in Triton's interpreter."""
    return device.startswith("cuda") or os.environ.get("TRITON_INTERPRET") == "1"
