"""The running service: readers, HTTP API, and the wiring between sources, ledger and exporters."""
