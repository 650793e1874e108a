"""Explain the KV-cache memory of paged-attention LLM engines.

Who holds every block, why, since when, and what to do.
"""
