"""A paged-attention engine: real tokens through a paged KV cache, and every mutation of a block, queue or request said.

config.py    what can be set                      request.py, sampling.py, queues.py   the nouns
blocks/      which block belongs to whom          scheduler.py                         what each step computes
models/      weights and tokenizers               runner.py                            one step's tokens:
                                                  batch.py, attention.py, sampler.py   laid out, attended, chosen
core.py      the loop over all of these           llm.py, server.py, __main__.py       its ways in
connectors/  KV kept outside the pool             watchdog.py, faults.py               stalls, and incidents on purpose
"""
