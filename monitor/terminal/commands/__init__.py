"""The commands of `monitor`, one module each: `add` defines one on the command line."""
