"""Events in, state out: every block, request and queue of an engine, with its reason and its age.

No I/O, no clock, no threads: time enters as records, so that a recording gives the same result as the live stream.
Anything impossible becomes an anomaly and never raises.

The fold, state = apply_events(state, batch):

    engine_state.py       EngineState: all columns, records and counters, and the queries over them
    records.py            one struct for each request, deferral, step, tier, anomaly; the columns of residency samples
    fold.py               apply_events, the hot loop, and the table of handlers by kind
    block_events.py       allocated, cached, reused, released, detached, reclaimed
    holders.py            references, owners and tables, also where an engine breaks its own rules
    request_events.py     arrival, queueing, admission, preemption, waits, the end
    engine_events.py      start, steps, progress, heartbeats, memory, offload tiers
    audit_events.py       the engine's own tables, compared with the state, or adopted after a loss
    prefix_reuse.py       which prompt evicted which cached content, and which were computed though it was cached
    durations.py          how long recent steps, transfers and grammars took, and steps by what they compute
    keyframe_codec.py     EngineState as bytes and back; part of the wire contract
    invariants.py         what holds for every state that no lost event has damaged

One engine's ledger, the fold over time:

    engine_ledger.py      folds records of every kind, keeps the recent past, counts losses
    ledger_records.py     positions in the stream, losses, anomalies, points of the recent past
    balance.py            the conservation law: every block once, by its most active holder
    tally.py              statistics over time: latencies, recomputed tokens, how long blocks stay
    queue_state.py        the requests that have not ended, and what a head of the queue holds back
    pool_forecast.py      blocks in use at each drain to idle, and when blocks that do not return fill the pool
    stream_clock.py       stream time, and signs that several processes or sources speak for one engine
    heartbeat_history.py  whether the scheduler makes passes and polls its connector
    first_token_pace.py   whether clients wait longer than usual
    cached_prefixes.py    the prefix cache by KV events

What is computed from a ledger:

    wait_graph.py         what a request waits for, who holds that and whether the holder moves, down to live reasons
    event_history.py      the events about a block or a request, lists of events, and the phases of a request's life
    request_latency.py    how long requests waited, as percentiles
    pool_account.py       who holds how much of the pool: each block once, and what each request shares
    retained_blocks.py    the blocks that are held, and the fate of those allocated in a window
    usage_drop.py         every block that became free in a window, by reason
    prefix_tree.py        the prefix cache as a forest
    pool_imbalance.py     whether every block counts once, and what an idle engine still holds
    memory_breakdown.py   what a device's memory went to, also where the text states only a part
    demand.py             the load and the pool that a report states
    partial_replay.py     a copy of a ledger to continue from, and parts of batches
"""
