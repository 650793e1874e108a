"""Commands of `monitor` that have a module each: `add` puts one on the command line. The others are in monitor.cli."""
