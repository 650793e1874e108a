"""Grafana dashboards as code, for the Grafana that docker-compose.yml pins. Grafana gets `generated/`.

panels.py            how panels, queries, variables, annotations and links are made
fleet_page.py        all engines: which one needs a look
engine_page.py       one engine at a glance: pool, queue, work, memory, and how far to trust the figures
kv_cache_page.py     who holds the pool, for how long, and what the prefix cache does
requests_page.py     why requests wait, for how long, how they end, what preemption costs
findings_page.py     what is judged to be wrong, and the observer itself
vllm_page.py         a plain vLLM, by its own metrics: no kvscope needed
"""
