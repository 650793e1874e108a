"""The event contract between engines and the monitor: kinds of events, wire format, journal."""
