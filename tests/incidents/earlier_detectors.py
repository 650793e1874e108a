"""Print, as JSON, what the detectors of another checkout find in recordings: `earlier_detectors.py DIRECTORY ...`.

recall_beside.py runs it with PYTHONPATH at that checkout, and so it imports nothing of this one but the lab's watcher.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import msgspec

WATCHER = Path(__file__).parents[2] / "monitor" / "incidents" / "lab_watch.py"

if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("lab_watch", WATCHER)
    assert spec is not None
    assert spec.loader is not None
    lab_watch = sys.modules["lab_watch"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lab_watch)
    found = lab_watch.find_in_recordings([Path(argument) for argument in sys.argv[1:]])
    sys.stdout.buffer.write(msgspec.json.encode(found))
