"""ClickHouse as chDB, in a Python that has it: queries in, rows out."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HOW = (
    "chDB is not here (0.9 GB): python -m venv .venv-chdb && .venv-chdb/bin/pip install chdb, then name"
    " KVSCOPE_TEST_CHDB=$PWD/.venv-chdb/bin/python"
)
DOCS = Path(__file__).parent.parent.parent / "docs" / "history.md"
IN_DUCKDB = (
    "SELECT kind, count(*) FROM events GROUP BY kind ORDER BY kind",
    """SELECT block, arg_max(request, place) FILTER (taken), max(at_ns) AS since,
              sum(CASE WHEN taken THEN 1 ELSE -1 END)::BIGINT AS holds
       FROM (SELECT unnest(ids) AS block, request, at_ns, (epoch, sequence, event) AS place,
                    kind IN ('ALLOCATED', 'REUSED') AS taken
             FROM events WHERE kind IN ('ALLOCATED', 'REUSED', 'RELEASED', 'RECLAIMED') AND at_ns <= {at_ns})
       GROUP BY block HAVING holds > 0 AND since <= {at_ns} - 20000000000 ORDER BY block""",
    """SELECT epoch, request,
              arg_max(kind, (sequence, event)) FILTER (kind IN ('ARRIVED', 'ADMITTED', 'PREEMPTED')),
              sum(CASE WHEN kind IN ('ALLOCATED', 'REUSED') THEN len(ids) ELSE 0 END)::BIGINT
       FROM events WHERE request >= 0 AND at_ns <= {at_ns} GROUP BY epoch, request
       HAVING count(*) FILTER (kind = 'FINISHED') = 0 AND count(*) FILTER (kind = 'ARRIVED') > 0
       ORDER BY epoch, request""",
)
"""The questions of the docs, as `monitor sql` has them."""
_RUN = """
import json, sys, time
from chdb import session
chdb, answers = session.Session(), []
for query in json.load(sys.stdin):
    began = time.perf_counter()
    text = str(chdb.query(query, "JSONCompact"))
    answers.append({"seconds": time.perf_counter() - began, "rows": json.loads(text)["data"] if text.strip() else []})
json.dump(answers, sys.stdout)
"""


def chdb_python() -> str:
    """The Python that has chDB; the test is skipped where none is named."""
    python = os.environ.get("KVSCOPE_TEST_CHDB", "")
    if not python:
        pytest.skip(HOW)
    return python


def run_clickhouse(python: str, queries: Sequence[str]) -> list[dict[str, Any]]:
    """What each query answers, and in how many seconds."""
    settings = "SET output_format_json_quote_64bit_integers = 0"
    done = subprocess.run(
        [python, "-c", _RUN],
        input=json.dumps([settings, *queries]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers[1:]


def documented(endpoint: str, bucket: str, prefix: str, at_ns: int) -> list[str]:
    """The queries of docs/history.md, of an archive on this server: two views, and three questions."""
    (text,) = re.findall(r"```sql\n(.+?)```", DOCS.read_text(), re.DOTALL)
    text = text.replace("https://BUCKET.s3.REGION.amazonaws.com/PREFIX", f"{endpoint}/{bucket}/{prefix}")
    text = text.replace("'KEY', 'SECRET'", "'test', 'test'").replace("1769868000000000000", str(at_ns))
    return [query.strip() for query in text.split(";") if query.strip()]
