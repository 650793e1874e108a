"""The engine's loop, and what runs beside it.

engine_core.py          the loop: intake, plan, model, outputs
assembly.py             its parts, made from the settings
intake.py               requests and ends that other threads hand to it
idle.py                 the audit between steps, and pauses
event_stream.py         where it publishes its events
engine_description.py   the settings that the engine reports when it starts
watchdog.py             stalled requests, detected from a thread of its own
"""
