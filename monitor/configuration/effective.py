"""Which value of each setting is in force: of a flag, else the environment, else the file, else the default."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvscope.monitor.configuration.settings_file import BadConfiguration, Problem, SettingsFile, read_settings_file
from kvscope.monitor.configuration.settings_table import SETTINGS, Setting
from kvscope.monitor.discovery.discovery_config import DiscoveryConfig

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
