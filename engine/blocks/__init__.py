"""The KV cache's bookkeeping: which block belongs to which request. Imports no torch.

block_pool.py         every block: reference count, hash, free queue; the only place that changes them
prefix_hashes.py      the chain of hashes by which equal prefixes are found
kv_cache_manager.py   block tables of requests: allocate, reuse, cache, free
table_audit.py        reads all of it out, in slices, for the event stream
"""
