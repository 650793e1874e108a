"""Continuous batching: what each step computes. Imports no torch.

scheduler.py         plans a step, takes its results, ends requests
admission.py         waiting requests that may run
preemption.py        requests that lose their blocks to others
deferred_free.py     blocks that a KV connector keeps or fills
scheduler_state.py   the queues and parked requests that these share
waiting_queue.py     first come first served, or by priority
step_plan.py         the plan of one step
"""
