"""Tools to cause and measure incidents: faults, virtual time, the simulated engine, the load bench."""
