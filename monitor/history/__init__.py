"""Stored history: segments on disk, SQL over them, the state at any past time.

    history.py            queries: the ledger as it was, points, batches; several recordings together
    segment_files.py      segments: paths and names, the index of their frames, notes and keyframes
    segment_readers.py    reads an open segment, which is a journal, and any segment as far as it is intact
    sealed_segment.py     a closed one: tables in Parquet
    segment_writer.py     keeps the stream of one engine
    retention.py          keeps the streams of all engines, closes segments, deletes old ones
    findings_log.py       the transitions of findings
    archiver.py           copies closed segments to an archive (archive_store.py)
    sql_query.py          asks a query of a process of its own, which is confined (sql_process.py)
    sql_tables.py         the tables of a query (sql_segments.py: its segments, sql_files.py: its files)
    recorder.py           records a target into a directory, and publishes a recording again

A recording is read without anything of Parquet: only closed segments need it.
"""
