"""State in, judgements out: one class for each finding code. No I/O, no clock, no memory of their own.

detector.py   the base class, what a detector declares, and what it returns
registry.py   the detectors there are, those of other distributions, and `judge_engine`, which runs them all
dialects.py    advice in SGLang's words
runbook_files.py  the runbook of each code, from the wheel or the checkout
measured_harm.py   severity by what is measured of a finding's effect, and its alternatives
written/      what the text of a log or a report shows beside its statistics
leak/ stuck/ thrash/ collapse/ corrupt/ sizing/ imbalance/ held/ blind/ harm/   a module for each code, and shared parts

Each detector inspects one engine's ledger and yields a Judgement for each problem that it sees now. How a problem
develops over time is up to kvscope.monitor.detectors.findings. No detector knows which faults an engine has on.
"""
