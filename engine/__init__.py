"""A paged-attention engine: real tokens through a paged KV cache, with an event for every change of a block or queue.

config.py      settings                                   requests/     a request, its sampling and its output
blocks/        which block belongs to which request       scheduling/   what each step computes
models/        weights and tokenizers                     execution/    one step on the device
connectors/    KV kept outside the pool                   core/         the loop over all of these, and its watchdog
serving/       HTTP server, offline use, metrics          lab/          virtual time and the load bench
faults.py      incidents on purpose                       command_line.py   `kvscope engine`
"""
