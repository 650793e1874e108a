"""Prometheus beside kvscope: its configuration, and rules as code with what they generate."""
