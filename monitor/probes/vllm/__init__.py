"""The probe for vLLM: a plugin that reports what its scheduler and block pool do.

Installed beside vLLM it loads by itself (entry point `vllm.general_plugins`). KVSCOPE_EVENTS in the environment
switches it on. It wraps vLLM's methods and replaces nothing. Errors in it never reach vLLM.

    plugin.py              what vLLM calls: waits for a Scheduler to be made, and attaches a probe to it
    probe.py               the probe: its parts, heartbeats, start and stop
    scheduler_hooks.py     passes of the scheduler: steps, admissions
    request_hooks.py       arrivals, ends, preemptions, transfers
    block_hooks.py         the block pool
    wait_causes.py         why requests were passed over
    emitter.py             from notes to the event log
    probe_state.py         what the hooks share
    hooks.py               a guarded wrapper around one method of one object
    owner.py               whose blocks the pool is handing out or taking back
    table_reader.py        reads vLLM's own tables out, in slices, and those of an idle engine from the drain thread
    vllm_description.py    the engine's description when it starts, and the memory breakdown, as its worker measured it
    compatibility.py       whether this vLLM has what the probe hooks into
"""
