"""The engine's nouns: a request, its sampling parameters, its output. Imports no torch.

request.py             a request and its scheduling state
sampling_params.py     how its tokens are sampled
structured_output.py   the grammar that its output follows, compiled in a thread
kv_transfer.py         KV that it fetches from another engine, or leaves for one
request_output.py      what the engine reports of it after each step
"""
