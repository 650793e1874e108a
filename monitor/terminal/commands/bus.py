"""`monitor bus`: the streams of a tenant in NATS, what they hold, and what its credentials need."""

from __future__ import annotations

import argparse
import asyncio

from rich.table import Table

from ...base.errors import CannotTell
from ...base.text import escaped, percent
from ...fleet.bus_config import BusConfig, bus_config
from ...fleet.bus_subjects import BusRole, permissions_of
from ...service.settings_table import BUS_SETTINGS, add_flag, size
from ..report import FINDINGS, NOTHING
from ..terminal import terminal_console
from .shared_flags import needs, print_json

DEFAULT_URL_OF_NATS = "nats://127.0.0.1:4222"
MAX_REPLICAS = 5
"""Of JetStream."""


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
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
    allowed = actions.add_parser(
        "permissions",
        help="print the permissions of one role in a tenant, for nats-server",
        description="Prints what the credentials of one role need, and nothing more. NATS knows a sender by its"
        " credentials alone: give each role credentials of its own, and each agent, too.",
    )
    roles = allowed.add_mutually_exclusive_group(required=True)
    roles.add_argument(
        "--agent", metavar="NAME", help="for the agent of that name (--nats-agent). '*': for several, of any name"
    )
    for flag, role, text in (
        ("--hub", "hub", "for hubs"),
        ("--read-only", "reader", "for `monitor bus status`, which publishes nothing"),
        ("--setup", "setup", "for `monitor bus setup`, which makes the streams"),
    ):
        roles.add_argument(flag, action="store_const", const=role, dest="role", help=text)
    allowed.add_argument(
        "--share", action="store_true", help="with --agent: it shares engines with other agents (--nats-share)"
    )
    allowed.set_defaults(role="agent", agent="")
    allowed.add_argument("--nats-tenant", default="default", metavar="NAME", help="the tenant (default: default)")
    allowed.set_defaults(run=_permissions)
    for action in (setup, shown):
        for setting in BUS_SETTINGS:
            add_flag(action, setting)


def _bus_config(parsed: argparse.Namespace, role: BusRole) -> BusConfig:
    defaults = {setting.key: setting.default for setting in BUS_SETTINGS} | {"nats": (DEFAULT_URL_OF_NATS,)}
    return bus_config(lambda key: getattr(parsed, key, defaults[key]), role)


def _setup(parsed: argparse.Namespace) -> int:
    done = asyncio.run(_make_streams(_bus_config(parsed, "setup"), parsed.replicas, parsed.bytes))
    for line in done:
        print(line)
    return NOTHING


async def _make_streams(config: BusConfig, replicas: int, most_bytes: int) -> list[str]:
    with needs("bus", "fleet"):
        from ...fleet.bus_connection import NATS_ERRORS, connect_bus, nats_error_text
        from ...fleet.bus_streams import make_streams

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
    with needs("bus", "fleet"):
        from ...fleet.fleet_reader import read_fleet

    fold = read_fleet(_bus_config(parsed, "reader"))
    engines = fold.engines()
    found = any(engine.findings for engine in engines.values())
    if parsed.json:
        print_json({"engines": engines, "unreadable": fold.unreadable})
        return FINDINGS if found else NOTHING
    table = Table("engine", "agent", "status", "usage", "running", "waiting", "findings", box=None)
    for name, engine in engines.items():
        view = engine.point.engine
        codes = [finding.code for finding in engine.findings] + [f"unknown {id}" for id in engine.missing]
        usage = "" if view.usage is None else percent(view.usage)
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
    if parsed.share and not parsed.agent:
        raise ValueError("--share is of an agent: give --agent NAME, too")
    allowed = permissions_of(parsed.nats_tenant, parsed.role, parsed.agent, share=parsed.share)
    print("permissions {")
    for verb, subjects in allowed.items():
        listed = "\n".join(f'    "{subject}"' for subject in subjects)
        print(f"  {verb} {{ allow = [\n{listed}\n  ] }}")
    print("}")
    return NOTHING
