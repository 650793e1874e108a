"""Events in, state out: what every block, request and queue of an engine is, why, and since when.

No I/O, no clock, no threads: time enters as records, so that a recording gives what the live stream gave.

    ledger.py    one engine's ledger: folds frames, keeps the recent past, counts what was lost
    balance.py   the conservation law: every block once, by its liveliest holder
    because.py   the chain from a block to the live reason that holds it
    story.py     the life of a block or a request, told from the events
    life.py      the life of a request as phases, with what each cost
    waits.py     what a request waits for, and who has it, down to the roots
    drops.py     what made usage fall in a window of time
    tally.py     what is counted beyond the books, to be drawn over time: residency.py, recompute.py, latency.py
"""
