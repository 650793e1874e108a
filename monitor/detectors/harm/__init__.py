"""Harm that no other finding explains: one code for each kind of `kvscope.monitor.ledger.harms`, the cause unknown."""
