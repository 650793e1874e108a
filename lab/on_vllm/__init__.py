"""The lab on vLLM's own scheduler: bare, in virtual time, under the probe.

These modules run in this process:
vllm_draws.py     an engine, its clients and its fault, drawn as for kvscope's own engine
fault_table.py    the faults by name, with the public report of each
vllm_worker.py    the process of vLLM's Python that forks once for each episode
vllm_episode.py   an episode as the lab sees it: the recording and the final state that the other process wrote

These run in vLLM's Python, which imports vLLM inside functions:
fork_server.py    reads what to run, forks, and answers with the final state
vllm_engine.py    the scheduler under the probe in virtual time, and the clients
cache_groups.py, scheduler_maker.py   vLLM's objects, in whatever form the release has them
vllm_outside.py   what stands in for the connector's worker, the grammar compiler and the model
vllm_faults.py    defects, most of them vLLM's own from public issues
vllm_witness.py   what happened, seen in vLLM's own objects
vllm_end.py       a whole episode, and the final state from vLLM's own tables
lab_connector.py  a KV connector that vLLM imports by name
"""
