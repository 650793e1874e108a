"""State in, judgements out: one class for each finding code. No I/O, no clock, no memory of their own.

detector.py          the base class, and what a detector declares
judgement.py         what a detector returns
registry.py          the detectors there are, what is derived from them, and `judge_engine`, which runs them all
plugin_detectors.py  the detectors of other distributions
thresholds.py        thresholds and settings
ties.py              what makes one finding the effect of another
written/             what the text of a log or a report shows beside its statistics
leak/ stuck/ thrash/ collapse/ corrupt/ sizing/ imbalance/ held/ blind/   a module for each code, and what several share

Each detector inspects one engine's ledger and yields a Judgement for each problem that it sees now. How a problem
develops over time is up to kvscope.monitor.findings. No detector knows which faults an engine has on.
"""
