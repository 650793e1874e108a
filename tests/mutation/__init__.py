"""Mutants of the judgement, each run against the tests that reach it: `python -m tests.mutation`.

mutant_sites.py      what may be mutated in a module, from its syntax tree
live_mutants.py      a mutant applied to the imported modules of a process
reaching_tests.py    which tests reach which functions, recorded once by a pytest plugin
mutation_run.py      a seeded sample, each in a forked process, and the table
review_mutants.py    mutants that a review of these rules named, always part of the sample
accepted_mutants.py  mutants that change nothing that can be seen, each with its reason
"""
