"""Plug-ins that fail."""
