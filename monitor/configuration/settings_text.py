"""The settings in force as a configuration file would have them, each with where it comes from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from kvscope.monitor.configuration.effective import Effective
from kvscope.monitor.configuration.service_config import service_config
from kvscope.monitor.configuration.settings_table import SETTINGS, THRESHOLDS_KEY, Setting
from kvscope.monitor.configuration.value_types import length, length_or_never
from kvscope.monitor.discovery.discovery_config import DISCOVERIES
from kvscope.monitor.sources.exposition import shown

HIDDEN: Final = "(hidden)"


def setting_lines(effective: Effective) -> Iterator[str]:
    """Yield each setting that has a value as a line of TOML. Secrets, and passwords in addresses, are hidden."""
    in_force = effective.values | {"events": service_config(effective).events}
    for key, setting in SETTINGS.items():
        if key != THRESHOLDS_KEY and in_force[key] is not None:
            yield f"{key} = {_value_text(setting, in_force[key])}  # {effective.layers[key]}"
    yield from _discovery_lines(effective)
    if effective[THRESHOLDS_KEY]:
        yield ""
        yield f"[{THRESHOLDS_KEY}]  # {effective.layers[THRESHOLDS_KEY]}"
        for text in effective[THRESHOLDS_KEY]:
            name, _, value = text.partition("=")
            yield f"{name} = {value}"


def _discovery_lines(effective: Effective) -> Iterator[str]:
    for config in effective.discovery:
        yield ""
        yield f"[[{next(table for table, kind in DISCOVERIES.items() if isinstance(config, kind))}]]"
        for name, value in msgspec.to_builtins(config).items():
            if isinstance(value, dict):
                pairs = (f"{json.dumps(key)} = {json.dumps(text)}" for key, text in value.items())
                yield f"{name} = {{ {', '.join(pairs)} }}"
            else:
                text = re.sub(r"\?.*", f"?{HIDDEN}", shown(value)) if name == "url" else value
                yield f"{name} = {json.dumps(text, ensure_ascii=False)}"


def _value_text(setting: Setting, value: Any) -> str:
    if isinstance(value, tuple):
        return json.dumps([HIDDEN if setting.is_secret else shown(str(each)) for each in value], ensure_ascii=False)
    if isinstance(value, Path):
        value = str(value)
    elif setting.parse in (length, length_or_never) and value:
        value = f"{value}s"
    if isinstance(value, str):
        value = HIDDEN if setting.is_secret and value else shown(value)
    return json.dumps(value, ensure_ascii=False)
