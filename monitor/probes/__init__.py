"""Probes make an engine that is not ours speak the contract, from inside its process.

packer.py         numbers batches, packs their columns, and folds what it sends, for keyframes
publisher.py      the drain thread: it packs and sends what an engine logged
replay_server.py  answers readers that missed batches
stall_capture.py  the engine's stack at the moment it stops
vllm/             the probe of vLLM

kvscope's own engine publishes by the same packer and publisher.
"""
