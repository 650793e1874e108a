"""The incident lab: every fault of kvscope's own engine, injected in virtual time and judged like a stream.

client_load.py     clients, and their requests
simulated_run.py   an engine as its judge sees it: the affected requests, and the beginning of the incident
scenarios/         the table: which fault, on which engine, under which load, for how long
lab_run.py         one run: the engine in virtual time, its events as bytes, the monitor's findings, and the verdict
lab_report.py      many runs, and their results
trial.py           one drawn engine and load, judged by the truth (truth/, trial_batch.py: many of them)
draws.py           engines and loads drawn at random (needed_loads.py: their bounds, and what faults need)
accuracy.py        the results of trials: recall, precision, time to finding
on_vllm/           the same with vLLM's own scheduler
cross_check/       a second account of the truth, from raw events, to compare with
samples/           measurements on samples of drawn runs

stepped_engine.py  an engine without a model that its caller steps, for tests and campaigns
chaos/             faults and soaks against real processes
mutation/          mutants of the judgement, run against its tests
fuzzing/           damaged input for every reader

No wheel has it. It may import everything; only tests, benchmarks and scripts import it.
"""
