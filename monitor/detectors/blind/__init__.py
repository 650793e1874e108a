"""Limits of the observer's own view. Information, never above."""
