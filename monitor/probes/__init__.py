"""Probes: each makes an engine that is not ours speak the contract, from inside its process."""
