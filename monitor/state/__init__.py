"""The state machine: state = apply_events(state, batch), for every block, request, step and tier of one engine.

No I/O and no clock: time enters with the events. Anything impossible becomes an anomaly and never raises.

    engine_state.py       EngineState: all columns, records and counters, and the queries over them
    records.py            one struct for each request, deferral, step, tier, anomaly
    fold.py               apply_events, the hot loop, and the table of handlers by kind
    block_events.py       allocated, cached, reused, released, detached, reclaimed
    request_events.py     arrival, queueing, admission, preemption, waits, the end
    step_events.py        start, steps, progress, heartbeats, memory
    tier_events.py        offload tiers and their pins
    audit_events.py       the engine's own tables, compared with the state, or adopted after a loss
    cached_prompts.py     which prompts were computed though other blocks had their content
    evictions.py          which prompt evicted which cached content
    step_times.py         what recent steps computed and how long each took, for a reader that judges them
    outside_waits.py      how long recent transfers and grammars took, for the same reader
    residency_samples.py  when blocks came and went, for a reader that counts residency
    keyframe_codec.py     EngineState as bytes and back; part of the wire contract
"""
