"""Continuous batching: the waiting queue, admission and preemption. Imports no torch."""
