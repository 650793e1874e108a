"""Continuous batching: what each step computes. Imports no torch.

scheduler.py         plans a step, takes its results, ends requests
admission.py         waiting requests that may run, those that lose their blocks to others, and blocks of a connector
scheduler_state.py   the rules, the plan of a step, and the queues that these share
"""
