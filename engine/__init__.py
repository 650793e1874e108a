"""A paged-attention engine: real tokens through a paged KV cache, with an event for every change of a block or queue.

config.py      settings                                   request.py, sampling_params.py   the nouns
blocks/        which block belongs to which request       scheduling/   what each step computes
models/        weights and tokenizers                     execution/    one step on the device
connectors/    KV kept outside the pool                   serving/      HTTP server, offline use, metrics
core.py        the loop over all of these                 watchdog.py   stalls, seen from outside
lab/           faults, virtual time, the load bench       command_line.py   `kvscope engine`
"""
