"""The KV cache's bookkeeping: which block belongs to whom. Knows nothing of tensors, and imports no torch.

free_queue.py   the free blocks, in the order in which they will be handed out
pool.py         every block: reference count, hash, free queue; the only place that changes them
hashing.py      the chain of hashes by which equal prefixes are found
manager.py      block tables of requests: allocate, reuse, cache, free
audit.py        reads all of it out, in slices, for the event stream
"""
