"""The state machine: what an engine's events add up to, folded into the state of every block and request."""
