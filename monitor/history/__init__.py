"""What was seen, kept: segments on disk, SQL over them, the state at any past moment.

history.py    what is asked: the ledger as it was, points, batches
segments.py   where things lie, and what they are called
index.py      what is where in a segment
opened.py     an open segment: a journal's file
keyframes.py  keyframes cut from a ledger
"""
