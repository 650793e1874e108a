"""A support bundle: an anonymized zip with a part of an engine's events, and the findings in them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvscope.monitor.errors import BadTarget
from kvscope.monitor.events import journal, limits
from kvscope.monitor.sources.zip_members import ZIP_DAMAGE, members_of, pieces_of

EVENTS_FOLDER: Final = "events/"
"""The folder in it that is a journal."""
OTHER_MEMBERS: Final = frozenset(("README.txt", "report.txt", "report.json", "configuration.json", "versions.json"))
"""Its other members. Other archives may have one or two files of these names."""
BEGINNING_BYTES: Final = 1 << 20
ZIP: Final = b"PK\x03\x04"


class NotABundle(BadTarget):
    """The file is a zip, and no bundle of ours, or a damaged one. The message gives the reason."""


def is_bundle(path: Path) -> bool:
    """Return whether the zip at `path` has events in it, or cannot be read. Raises OSError.

    A bundle whose directory is damaged may lack the name of its events: its reports are no logs of an engine. The names
    also stand before each member, the first of them at the file's beginning.
    """
    with path.open("rb") as file:
        beginning = file.read(BEGINNING_BYTES)
    try:
        names = [member.filename for member in members_of(path)]
    except ZIP_DAMAGE:
        return True  # reading it explains why
    written = sum(name.encode() in beginning for name in OTHER_MEMBERS)
    return not names or written > 2 or any(name.startswith(EVENTS_FOLDER) for name in names)


def unpack_events(path: Path, directory: Path) -> None:
    """Write the journal that is in the bundle at `path` into `directory`. Raises NotABundle."""
    left = limits.BUNDLE_BYTES
    try:
        for member in members_of(path):
            name = Path(member.filename).name
            if member.filename.startswith(EVENTS_FOLDER) and name.endswith(journal.SUFFIX):
                with (directory / name).open("wb") as file:
                    for piece in pieces_of(path, member):
                        left -= len(piece)
                        if left < 0:
                            raise NotABundle(f"{path}: its events are more than {limits.BUNDLE_BYTES >> 30} GiB")
                        file.write(piece)
    except NotABundle:
        raise
    except ZIP_DAMAGE as error:
        raise NotABundle(f"{path} is a damaged zip, or none: {error or type(error).__name__}") from error
    if not any(directory.iterdir()):
        raise NotABundle(f"{path} is a zip without events: `monitor bundle TARGET FILE` makes one that has them")
