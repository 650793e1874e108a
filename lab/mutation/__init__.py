"""Mutants of the judgement, each run against the tests that reach it: `python -m kvscope.lab.mutation`.

mutant_sites.py      what may be mutated in a module, from its syntax tree
review_mutants.py    mutants that a review of these rules named, always part of the sample
mutant_sample.py     the seeded sample
live_mutants.py      a mutant applied to the imported modules of a process
called_functions.py  the functions that a piece of code calls
reaching_tests.py    which tests reach which functions, recorded once by a pytest plugin
mutant_fork.py       a forked process with one mutant in it, which runs these tests
vllm_forks.py        forks of a process that has imported vLLM, for tests of the probe
mutation_run.py      the run of a sample
mutant_results.py    what became of each mutant, and the table
accepted_mutants.py  mutants that change nothing that can be seen, each with its reason
"""
