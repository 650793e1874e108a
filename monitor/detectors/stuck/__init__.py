"""Requests, or the whole engine, that do not move."""
