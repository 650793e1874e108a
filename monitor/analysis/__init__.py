"""Pure analyses of a ledger: ownership, usage drops, wait trees, memory breakdown, event history."""
