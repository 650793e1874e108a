"""The engine's loop, and what runs beside it.

engine_core.py          the loop: intake, plan, model, outputs
engine_description.py   the settings that the engine reports when it starts
watchdog.py             stalled requests, detected from a thread of its own
"""
