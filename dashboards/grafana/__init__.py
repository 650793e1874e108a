"""Grafana dashboards as code, for the Grafana that docker-compose.yml pins; `generated/` is what it is given.

parts.py      how a page and a panel are made
fleet.py      all engines: which one needs a look
engine.py     one engine at a glance: pool, queue, work, memory, and how far to trust the figures
kv_cache.py   who holds the pool, for how long, and what the prefix cache does
requests.py   why requests wait, for how long, how they end, what preemption costs
findings.py   what is judged to be wrong, and the observer itself
vllm.py       a plain vLLM, by its own metrics: no kvscope needed
"""
