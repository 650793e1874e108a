"""Reads a configuration file, with every problem by line and key, and finds the value of each setting that is in force:
of a flag, else the environment, else the file, else the default.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from ..base import limits
from ..base.errors import BadTarget, KvscopeError
from ..sources.discovery_config import DISCOVERIES, DiscoveryConfig, discovery_of
from .settings_table import SETTINGS, THRESHOLDS_KEY, Setting

_TABLE_LINE: Final = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?")


class Problem(NamedTuple):
    """The error in a key, and its remedy. `line` is 0 where no line is at fault."""

    message: str
    key: str = ""
    line: int = 0


class BadConfiguration(KvscopeError, ValueError):
    """A configuration that cannot be used. `lines` has one line for each problem."""

    def __init__(self, file: Path | None, problems: list[Problem]) -> None:
        self.problems = problems
        self.lines = [_problem_line(file, problem) for problem in problems]
        super().__init__("; ".join(self.lines))

    @property
    def where(self) -> str:
        """The lines and keys at fault, without their values: a value may be a secret."""
        places = [(f"line {each.line}" if each.line else "", each.key) for each in self.problems]
        return "; ".join(": ".join(filter(None, place)) or "the file cannot be read" for place in places)


class SettingsFile(NamedTuple):
    """The settings of a file, by key, as flags would have given them."""

    path: Path
    values: dict[str, Any]
    text: str
    discovery: tuple[DiscoveryConfig, ...] = ()

    def line_of(self, key: str) -> int:
        """Return the line where a key is set, 0 if it is not found."""
        return line_of(self.text, key)


def read_settings_file(path: Path) -> SettingsFile:
    """Read a file. Raises BadConfiguration with all of its problems."""
    text = _text_of(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        raise BadConfiguration(path, [Problem(f"this is not TOML: {error}", line=line)]) from error
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    discovery: list[DiscoveryConfig] = []
    for key, value in document.items():
        if key in DISCOVERIES:
            problems += _read_discoveries(key, value, text, discovery)
            continue
        setting = SETTINGS.get(key)
        if setting is None:
            near = difflib.get_close_matches(key, [*SETTINGS, *DISCOVERIES], n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known keys: {', '.join([*SETTINGS, *DISCOVERIES])}"
            problems.append(Problem(f"there is no such setting: {remedy}", key, line_of(text, key)))
            continue
        try:
            values[key] = _threshold_texts(value) if key == THRESHOLDS_KEY else _file_value(setting, value)
        except argparse.ArgumentTypeError as error:
            problems.append(Problem(str(error), key, line_of(text, key)))
    if problems:
        raise BadConfiguration(path, problems)
    return SettingsFile(path, values, text, tuple(discovery))


def _read_discoveries(table: str, value: Any, text: str, into: list[DiscoveryConfig]) -> Iterator[Problem]:
    """Read the discoveries of one kind, and yield what is wrong with them."""
    if not isinstance(value, list):
        yield Problem(f"write [[{table}]], with two brackets: there may be several", table, line_of(text, table))
        return
    for number, block in enumerate(value):
        line = line_of(text, table, number)
        try:
            config = discovery_of(table, block)
            config.finder().close()
        except (BadTarget, ValueError) as error:
            yield Problem(str(error), table, line)
            continue
        if config.name in {other.name for other in into}:
            yield Problem(f"{config.name} is there twice: merge the two", table, line)
        into.append(config)


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(limits.CONFIGURATION_BYTES + 1)
    except OSError as error:
        remedy = "name a TOML file that this user may read"
        raise BadConfiguration(path, [Problem(f"cannot be read: {error.strerror}; {remedy}")]) from error
    if len(content) > limits.CONFIGURATION_BYTES:
        raise BadConfiguration(path, [Problem(f"has more than {limits.CONFIGURATION_BYTES:,} bytes")])
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadConfiguration(path, [Problem("this is not UTF-8, as TOML is", line=line)]) from error


def _file_value(setting: Setting, value: Any) -> Any:
    """Return the value as its flag would give it. Raises argparse.ArgumentTypeError."""
    if setting.shape == "switch":
        if not isinstance(value, bool):
            raise argparse.ArgumentTypeError("write true or false")
        return value
    if setting.shape == "list":
        if not isinstance(value, list):
            raise argparse.ArgumentTypeError(f'write a list: {setting.key} = ["…"]')
        return tuple(_parsed(setting, each) for each in value)
    return _parsed(setting, value)


def _parsed(setting: Setting, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        kind = "a list" if isinstance(value, list) else "a table" if isinstance(value, dict) else str(value).lower()
        raise argparse.ArgumentTypeError(f"{kind} cannot stand here: write a text or a number")
    return setting.parse(str(value))


def _threshold_texts(value: Any) -> tuple[str, ...]:
    """Return a table of thresholds as --set takes them."""
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("write a table: [thresholds], and a line CODE.NAME = NUMBER for each")
    return tuple(f"{name}={number}" for name, number in _flattened(value))


def _flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{name}.")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise argparse.ArgumentTypeError(f"{prefix}{name} = {value!r} is not a number")
        else:
            yield f"{prefix}{name}", value


def line_of(text: str, key: str, number: int = 0) -> int:
    """Return the first line of a TOML text that sets `key` or begins its table, or 0 if none is found.

    If several tables have a name, `number` counts them from 0. For a threshold, `key` is thresholds.CODE.NAME. Strings
    over several lines may mislead it.
    """
    table = ""
    for at, line in enumerate(text.splitlines(), 1):
        header = _TABLE_LINE.fullmatch(line.partition("#")[0].rstrip())
        if header is not None:
            table = f"{_bare(header[1])}."
        name = table.removesuffix(".") if header is not None else f"{table}{_bare(line.partition('=')[0])}"
        if name == key and (header is not None or "=" in line):
            if number == 0:
                return at
            number -= 1
    return 0


def _bare(key: str) -> str:
    return re.sub(r"[\"'\s]", "", key)


def _problem_line(file: Path | None, problem: Problem) -> str:
    place = ":".join(filter(None, (str(file) if file else "", str(problem.line) if problem.line else "")))
    return ": ".join(filter(None, (place, problem.key, problem.message)))


SettingLayer = Literal["flag", "environment", "file", "default"]


@dataclass(frozen=True)
class Effective:
    """Every setting's value, and where it comes from. `file`: the configuration file, if there is one."""

    values: dict[str, Any]
    layers: dict[str, SettingLayer]
    file: SettingsFile | None = None

    def __getitem__(self, key: str) -> Any:
        """Return the value of a setting."""
        return self.values[key]

    @property
    def discovery(self) -> tuple[DiscoveryConfig, ...]:
        """The discoveries in the file."""
        return self.file.discovery if self.file is not None else ()

    def problem(self, key: str, message: str) -> Problem:
        """Return a problem of a setting, with its line if the file sets it, else with its flag or variable."""
        setting = SETTINGS[key]
        if self.layers[key] == "file" and self.file is not None:
            return Problem(message, key, self.file.line_of(key))
        return Problem(message, setting.variable if self.layers[key] == "environment" else setting.option)

    def refuse(self, problems: list[Problem]) -> None:
        """Raise BadConfiguration if there are problems."""
        if problems:
            raise BadConfiguration(self.file.path if self.file is not None else None, problems)


@dataclass(frozen=True)
class SettingsLayers:
    """The flags and variables that a command was started with, over a file that may be read again."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def read(self) -> Effective:
        """Read the file, if there is one, and return what is in force. Raises BadConfiguration."""
        file = read_settings_file(self.path) if self.path is not None else None
        values: dict[str, Any] = {}
        layers: dict[str, SettingLayer] = {}
        for key, setting in SETTINGS.items():
            if key in self.flags:
                given = self.flags[key]
                values[key], layers[key] = tuple(given) if setting.shape == "list" else given, "flag"
            elif self.environment.get(setting.variable) or (  # of a list, an empty variable is an empty list
                setting.shape == "list" and setting.variable in self.environment
            ):
                values[key], layers[key] = _of_variable(setting, self.environment[setting.variable]), "environment"
            elif file is not None and key in file.values:
                values[key], layers[key] = file.values[key], "file"
            else:
                values[key], layers[key] = setting.default, "default"
        return Effective(values, layers, file)


def settings_layers(parsed: argparse.Namespace) -> SettingsLayers:
    """Return the layers of a command line that `add_flags` defined."""
    flags = {key: value for key, value in vars(parsed).items() if key in SETTINGS}
    return SettingsLayers(flags, parsed.config)


def _of_variable(setting: Setting, text: str) -> Any:
    if setting.shape == "list":
        return tuple(filter(None, (setting.parse(part) for part in text.split(setting.separator))))
    return setting.parse(text)
