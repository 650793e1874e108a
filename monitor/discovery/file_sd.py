"""Prometheus's file_sd: files with target groups, read again when they change."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import yaml

from kvscope.monitor.discovery.discovery_config import FileDiscovery
from kvscope.monitor.discovery.target_groups import DiscoveryFailed, FoundTargets, found_targets
from kvscope.monitor.events import limits

YAML_SUFFIXES: Final = (".yml", ".yaml")


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML without aliases: a few kilobytes of nested ones stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not read")
        return super().compose_node(parent, index)


class _ReadFile(NamedTuple):
    version: tuple[int, int, int]
    found: FoundTargets


class TargetFiles:
    """The targets of all files that the patterns match. A file is read when its time, size or inode changes."""

    def __init__(self, config: FileDiscovery) -> None:
        self._config = config
        self._read: dict[Path, _ReadFile] = {}

    def find(self) -> FoundTargets:
        """Return the targets of all files as they are now. Raises DiscoveryFailed if one cannot be read."""
        read: dict[Path, _ReadFile] = {}
        for pattern in self._config.files:
            paths = sorted(map(Path, glob.glob(pattern))) if glob.has_magic(pattern) else [Path(pattern)]
            for path in paths:
                read[path] = self._read_file(path)
        self._read = read
        targets = dict.fromkeys(target for each in read.values() for target in each.found.targets)
        return FoundTargets(tuple(targets), tuple(text for each in read.values() for text in each.found.left_out))

    def _read_file(self, path: Path) -> _ReadFile:
        try:
            status = path.stat()
            version = (status.st_mtime_ns, status.st_size, status.st_ino)
            if path in self._read and self._read[path].version == version:
                return self._read[path]
            with path.open("rb") as file:
                content = file.read(limits.TARGET_LIST_BYTES + 1)
        except OSError as error:
            raise DiscoveryFailed(f"{path} cannot be read: {error.strerror}") from error
        if len(content) > limits.TARGET_LIST_BYTES:
            raise DiscoveryFailed(f"{path} has more than {limits.TARGET_LIST_BYTES >> 20} MiB")
        try:
            is_yaml = path.suffix in YAML_SUFFIXES
            document = yaml.load(content, _PlainLoader) if is_yaml else msgspec.json.decode(content)
        except (yaml.YAMLError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            kind = "YAML" if is_yaml else "JSON"
            raise DiscoveryFailed(f"{path} is no {kind}: {' '.join(str(error).split())}") from error
        return _ReadFile(version, found_targets(document or [], self._config.labels, str(path)))

    def close(self) -> None:
        """Nothing stays open."""
