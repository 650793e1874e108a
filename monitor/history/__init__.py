"""Stored history: segments on disk, SQL over them, the state at any past time.

    history.py       what is asked: the ledger as it was, points, batches
    segments.py      where things lie, and what they are called
    index.py         what is where in a segment
    opened.py        an open segment: a journal's file
    closed.py        a closed one: tables in Parquet
    keyframes.py     keyframes cut from a ledger
    notes.py         what is kept beside the frames: points, samples, facts
    writer.py        keeps what one engine says
    keeper.py        keeps what all of them say; closes segments, drops what is too old
    findings_log.py  what was told of findings

A recording is read without anything of Parquet: only closed segments need it, and who closes them.
"""
