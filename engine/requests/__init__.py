"""The engine's nouns: a request, its sampling parameters, its output. Imports no torch.

request.py             a request, how its tokens are sampled, what it fetches or leaves for another engine, its outputs
structured_output.py   the grammar that its output follows, compiled in a thread
"""
