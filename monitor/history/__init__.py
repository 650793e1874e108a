"""Stored history: segments on disk, SQL over them, the state at any past time.

    history.py            queries: the ledger as it was, points, batches
    segment_files.py      paths and names of segments
    segment_index.py      the position of each frame in a segment
    active_segment.py     an open segment: a journal's file
    sealed_segment.py     a closed one: tables in Parquet
    guarded_segment.py    reads a segment as far as it is intact
    keyframe_cutter.py    keyframes cut from a ledger
    observations.py       notes beside the frames: points, samples, facts
    segment_writer.py     keeps the stream of one engine
    retention.py          keeps the streams of all engines, closes segments, deletes old ones
    findings_log.py       the transitions of findings
    archiver.py           copies closed segments to an archive (archive_store.py, archive_manifest.py, archive_files.py)
    sql_tables.py         the tables of a query (sql_segments.py: its segments)
    recorder.py           records a target into a directory (recordings.py: several together)
    replay_publisher.py   publishes a recording again

A recording is read without anything of Parquet: only closed segments need it.
"""
