"""Runs the engine's model through the kernels in Triton's interpreter, and prints how far its logits are from transformers'.

TRITON_INTERPRET=1 python -m tests.kernels.whole_model DIRECTORY
"""
