"""`monitor config check`: what is wrong with a configuration file, or the settings that it puts in force."""

from __future__ import annotations

import argparse
from pathlib import Path

from .shared_flags import needs


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    parser.description = (
        "Checks a configuration file without connecting anywhere. Prints each problem with its line, or the"
        " settings in force with the variables of this environment. Secrets are hidden."
    )
    parser.epilog = "exit codes: 0 valid, 2 invalid"
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="check a file", description=parser.description, epilog=parser.epilog)
    check.add_argument("file", type=Path, metavar="FILE", help="a TOML file for --config")
    check.set_defaults(run=_check_file)


def _check_file(parsed: argparse.Namespace) -> int:
    with needs("config", "serve"):
        from ...service.service_config import refuse_what_cannot_run, setting_lines
    from ...service.settings_file import SettingsLayers

    effective = SettingsLayers(path=parsed.file).read()
    refuse_what_cannot_run(effective)
    print("\n".join(setting_lines(effective)))
    return 0
