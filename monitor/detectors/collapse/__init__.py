"""Collapses: usage, or the yield of the prefix cache, falls from full to nothing."""
