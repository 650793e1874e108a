"""`monitor config check`: what is wrong with a configuration file, or the settings that it puts in force."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvscope.monitor.commands.shared_flags import Commands


def add(commands: Commands) -> None:
    """Put it on the command line."""
    parser = commands.add_parser(
        "config",
        help="check the configuration file of `monitor serve` and `monitor agent`",
        description="Checks a configuration file without connecting anywhere. Prints each problem with its line, or the"
        " settings in force with the variables of this environment. Secrets are hidden.",
        epilog="exit codes: 0 valid, 2 invalid",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="check a file", description=parser.description, epilog=parser.epilog)
    check.add_argument("file", type=Path, metavar="FILE", help="a TOML file for --config")
    check.set_defaults(run=_check_file)


def _check_file(parsed: argparse.Namespace) -> int:
    try:
        from kvscope.monitor.configuration.service_config import refuse_what_cannot_run
        from kvscope.monitor.configuration.settings_text import setting_lines
    except ImportError as error:
        raise ValueError(
            f"`monitor config` needs more than the base install: pip install 'kvscope[monitor]' ({error})"
        ) from error
    from kvscope.monitor.configuration.effective import SettingsLayers

    effective = SettingsLayers(path=parsed.file).read()
    refuse_what_cannot_run(effective)
    print("\n".join(setting_lines(effective)))
    return 0
