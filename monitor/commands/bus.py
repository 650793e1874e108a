"""`monitor bus`: the streams of a tenant in NATS, what they hold, and what its credentials need."""

from __future__ import annotations

import argparse
import asyncio

from rich.table import Table

from kvscope.monitor.bus.bus_config import BusConfig, bus_config
from kvscope.monitor.bus.bus_subjects import permissions_of
from kvscope.monitor.commands.shared_flags import Commands, print_json
from kvscope.monitor.configuration.settings_table import BUS_SETTINGS, add_flag
from kvscope.monitor.configuration.value_types import size
from kvscope.monitor.doctor.report import FINDINGS, NOTHING
from kvscope.monitor.doctor.terminal import terminal_console
from kvscope.monitor.errors import CannotTell
from kvscope.monitor.text import escaped

DEFAULT_URL_OF_NATS = "nats://127.0.0.1:4222"
MAX_REPLICAS = 5
"""Of JetStream."""


def add(commands: Commands) -> None:
    """Put it on the command line."""
    parser = commands.add_parser("bus", help="set up and inspect the NATS JetStream streams of agents")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    setup = actions.add_parser(
        "setup", help="create or update the streams of a tenant (needs a user with that permission)"
    )
    setup.add_argument(
        "--replicas",
        type=int,
        choices=range(1, MAX_REPLICAS + 1),
        default=1,
        help="copies of each stream. Use 3 in production (default: 1)",
    )
    setup.add_argument(
        "--bytes",
        type=size,
        default=1 << 30,
        metavar="SIZE",
        help="size of each stream: findings and points (default: 1G)",
    )
    setup.set_defaults(run=_setup)
    shown = actions.add_parser(
        "status",
        help="list all engines, their agents and open findings from the streams",
        epilog="exit codes: 0 no finding, 1 findings, 2 a wrong command line, 3 NATS or the streams cannot be read",
    )
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.set_defaults(run=_show_status)
    allowed = actions.add_parser("permissions", help="print the permissions of a tenant for nats-server")
    roles = allowed.add_mutually_exclusive_group()
    roles.add_argument("--hub", action="store_const", const="hub", dest="role", help="for a hub, not an agent")
    roles.add_argument(
        "--read-only", action="store_const", const="reader", dest="role", help="for a reader that publishes nothing"
    )
    allowed.set_defaults(role="agent")
    allowed.add_argument("--nats-tenant", default="default", metavar="NAME", help="the tenant (default: default)")
    allowed.set_defaults(run=_permissions)
    for action in (setup, shown):
        for setting in BUS_SETTINGS:
            add_flag(action, setting)


def _bus_config(parsed: argparse.Namespace) -> BusConfig:
    defaults = {setting.key: setting.default for setting in BUS_SETTINGS} | {"nats": (DEFAULT_URL_OF_NATS,)}
    return bus_config(lambda key: getattr(parsed, key, defaults[key]))


def _setup(parsed: argparse.Namespace) -> int:
    done = asyncio.run(_make_streams(_bus_config(parsed), parsed.replicas, parsed.bytes))
    for line in done:
        print(line)
    return NOTHING


async def _make_streams(config: BusConfig, replicas: int, most_bytes: int) -> list[str]:
    from kvscope.monitor.bus.bus_connection import NATS_ERRORS, connect_bus, nats_error_text
    from kvscope.monitor.bus.bus_streams import make_streams

    client = await connect_bus(config, wait=False)
    try:
        return await make_streams(client.jetstream(), config.tenant, replicas, most_bytes)
    except NATS_ERRORS as error:
        raise CannotTell(
            f"the streams of tenant {config.tenant} cannot be made ({nats_error_text(error)}). Does nats-server run"
            " with JetStream (-js), on as many servers as there should be replicas? May these credentials make streams?"
        ) from error
    finally:
        await client.close()


def _show_status(parsed: argparse.Namespace) -> int:
    from kvscope.monitor.bus.fleet_reader import read_fleet

    fold = read_fleet(_bus_config(parsed))
    engines = fold.engines()
    found = any(engine.findings for engine in engines.values())
    if parsed.json:
        print_json({"engines": engines, "unreadable": fold.unreadable})
        return FINDINGS if found else NOTHING
    table = Table("engine", "agent", "status", "usage", "running", "waiting", "findings", box=None)
    for name, engine in engines.items():
        view = engine.point.engine
        codes = [finding.code for finding in engine.findings] + [f"unknown {id}" for id in engine.missing]
        usage = "" if view.usage is None else f"{view.usage:.0%}"
        table.add_row(
            escaped(name),
            escaped(engine.point.agent),
            view.status,
            usage,
            *("" if count is None else str(count) for count in (view.running, view.waiting)),
            ", ".join(codes),
        )
    console = terminal_console()
    console.print(table)
    for reason, count in fold.unreadable.items():
        console.print(f"{count} messages could not be read: {escaped(reason)}", style="bold")
    return FINDINGS if found else NOTHING


def _permissions(parsed: argparse.Namespace) -> int:
    allowed = permissions_of(parsed.nats_tenant, parsed.role)
    print("permissions {")
    for verb, subjects in allowed.items():
        listed = "\n".join(f'    "{subject}"' for subject in subjects)
        print(f"  {verb} {{ allow = [\n{listed}\n  ] }}")
    print("}")
    return NOTHING
