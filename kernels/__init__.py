"""GPU kernels in Triton, each beside a plain torch twin that gives the same on any device.

Each step's attention of one new token of a sequence over its paged KV, `paged_decode`:

    query          [B, H, D]                           B sequences, H query heads of size D
    key_cache      [blocks, block_size, K, D]          K key-value heads; H / K query heads share each
    value_cache    the same
    block_tables   [B, M] int64                        beyond a sequence's end anything that is a block
    seq_lens       [B] int64, 1 to M * block_size      tokens that each sequence sees
    result         [B, H, D]

paged_decode.py        the kernel; importing it needs Triton
paged_decode_twin.py   its twin, and the gathering of pages that other attention in plain torch begins with
"""
