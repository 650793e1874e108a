"""The probe for vLLM: a plugin that says what its scheduler and block pool do.

Installed beside vLLM it is found by itself (entry point `vllm.general_plugins`); KVSCOPE_EVENTS in the environment
switches it on. It wraps what is there and replaces nothing; what goes wrong in it never reaches vLLM.

    plugin.py    what vLLM calls: waits for a Scheduler to be made, and attaches a probe to it
    probe.py     the probe: what each hook says
    hooks.py     a guarded wrapper around one method of one object
    owner.py     whose blocks the pool is handing out or taking back
    audit.py     reads vLLM's own tables out, in slices
    describe.py  what is said of the engine when it starts
    memory.py    the memory bill, as vLLM's worker measured it
    check.py     whether this vLLM has what the probe hooks into
"""
