"""The configuration file, its table of settings, reloads, and `monitor agent`."""
