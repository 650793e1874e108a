"""Brings events and samples in. All of these end in records that a ledger applies (Batch, Keyframe, Sample, Fact).

live.py        an engine's event stream, joined late and repaired when it has gaps
recording.py   a journal directory, or one segment of it
log.py         the text of an engine's log
target.py      tells which of these a doctor's or a recorder's target is
"""
