"""vLLM's own scheduler, bare: what the lab and tests of the probe make it of. Run by a Python that has vLLM.

cache_groups.py      KV cache groups, in whatever form the release has them
scheduler_maker.py   configuration, scheduler and a model's configuration without weights
"""
