"""The engine's loop, and what runs beside it.

engine_core.py   the loop: intake, plan, model, outputs
assembly.py      its parts, made from the settings: event stream, description, memory, connector, scheduler
intake.py        requests and ends that other threads hand to it, and statistics of those that ended
idle.py          the audit between steps, and pauses
watchdog.py      stalled requests, detected from a thread of its own
"""
