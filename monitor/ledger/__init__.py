"""Events in, state out: every block, request and queue of an engine, with its reason and its age.

No I/O, no clock, no threads: time enters as records, so that a recording gives the same result as the live stream.

    engine_ledger.py      one engine's ledger: folds frames, keeps the recent past, counts losses
    ledger_records.py     positions and losses, pool_points.py: points, engine_snapshot.py: snapshots
    balance.py            the conservation law: every block once, by its most active holder
    tally.py              statistics beyond the ledger, over time: residency.py, recompute.py, latency.py
    living_requests.py    requests that have not ended, and held_back.py: the cost of heads of the queue
    idle_floors.py        blocks in use at each drain to idle, and idle_holds.py: those in use while idle
    step_model.py         how long steps take by what they compute
    first_token_pace.py   whether clients wait longer than usual
    cached_prefixes.py    the prefix cache by KV events
    pool_forecast.py      when blocks that do not return fill the pool
"""
