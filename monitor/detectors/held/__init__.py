"""Causes that fill the pool without a leak, so that operators do not search for one. Information, never above."""
