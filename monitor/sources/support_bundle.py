"""A support bundle: a zip with a part of an engine's events in which nobody is named, and what was found in them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Final

from kvscope.monitor.errors import BadTarget
from kvscope.monitor.events import journal

EVENTS_FOLDER: Final = "events/"
"""The folder in it that is a journal."""
ZIP: Final = b"PK\x03\x04"
MOST_BYTES: Final = 8 << 30


class NotABundle(BadTarget):
    """The file is a zip, and no bundle of ours, or a damaged one; the message says why."""


def is_bundle(path: Path) -> bool:
    """Return whether the zip at `path` has events in it, or cannot be read. Raises OSError."""
    try:
        with zipfile.ZipFile(path) as bundle:
            names = bundle.namelist()
    except zipfile.BadZipFile:
        return True  # reading it explains why
    return not names or any(name.startswith(EVENTS_FOLDER) for name in names)


def unpack_events(path: Path, directory: Path) -> None:
    """Write the journal that is in the bundle at `path` into `directory`. Raises NotABundle."""
    try:
        with zipfile.ZipFile(path) as bundle:
            segments = [each for each in bundle.infolist() if each.filename.startswith(EVENTS_FOLDER)]
            if sum(each.file_size for each in segments) > MOST_BYTES:
                raise NotABundle(f"{path}: its events are more than {MOST_BYTES >> 30} GiB")
            for each in segments:
                name = Path(each.filename).name
                if name.endswith(journal.SUFFIX):
                    (directory / name).write_bytes(bundle.read(each))
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, OSError) as error:
        raise NotABundle(f"{path} is a damaged zip, or none: {error}") from error
    if not any(directory.iterdir()):
        raise NotABundle(f"{path} is a zip without events: `monitor bundle TARGET FILE` makes one that has them")
