"""`monitor`: the command line.

monitor doctor [TARGET…]        what is wrong, and what to do
monitor explain request ID      the life of a request
monitor explain block ID        why a block is held, and its life
monitor explain drop            what made usage fall or throughput vanish
monitor explain memory          what a device's memory went to, and what that leaves for KV
monitor top [TARGET]            engines, requests and findings at a terminal
monitor record TARGET DIR       keep a stream as a recording
monitor bundle TARGET FILE      a support bundle that names nobody
monitor diff BEFORE AFTER       what got better and what got worse
monitor export TARGET FILE      a recording or a stream, as a trace for Perfetto
monitor replay RECORDING        a recording as a live stream again
monitor sql QUERY               questions in SQL about what was kept
monitor probe check             whether a vLLM has what the probe hooks into
monitor incidents               every fault brought about in virtual time, and what is found of it
monitor serve                   the service: page, API, /metrics, alerts
monitor alerts test             whether alerts arrive; also list, silence, unsilence, replay
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from monitor.commands import bundle, diff, doctor, export, replay, sql, top
from monitor.commands.common import (
    DEFAULT_URL,
    TARGETS,
    a_time,
    add_shared,
    default_url,
    length,
    port,
    positive,
    print_json,
    size,
)
from monitor.detectors.thresholds import Settings
from monitor.doctor import explain
from monitor.doctor.memory import bill_in_log, bill_of_engines
from monitor.doctor.observe import CannotTell, observe
from monitor.doctor.report import CANNOT_TELL, FINDINGS, NOTHING, USAGE
from monitor.events.publisher import EVENTS_ENDPOINT
from monitor.events.wire import ContractError
from monitor.outlets.alerts.client import AlertsClient
from monitor.outlets.alerts.table import alerts_table
from monitor.query import Unreachable
from monitor.sources.target import BadTarget
from monitor.watch import NotKnown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `monitor` with these arguments (those of the process if None); its exit code."""
    parsed = parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
    except (BadTarget, ValueError) as error:
        print(f"monitor: {error}", file=sys.stderr)
        return USAGE
    except (CannotTell, Unreachable, NotKnown, ContractError) as error:
        print(f"monitor: {error}", file=sys.stderr)
        return CANNOT_TELL
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read us has seen enough
        return NOTHING
    return code


def parser() -> argparse.ArgumentParser:
    """The whole command line; the reference is made from it."""
    parser = argparse.ArgumentParser(
        prog="monitor", description="Explains the KV memory of paged-attention LLM engines."
    )
    parser.add_argument("--version", action="version", version=f"kvscope {version('kvscope')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor.add(commands)
    _add_explain(commands)
    _add_record(commands)
    bundle.add(commands)
    diff.add(commands)
    export.add(commands)
    replay.add(commands)
    sql.add(commands)
    top.add(commands)
    _add_probe(commands)
    _add_incidents(commands)
    _add_serve(commands)
    _add_alerts(commands)
    return parser


# -------------------------------------------------------------------- explain


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("explain", help="the life of a request, or why a block is held")
    things = parser.add_subparsers(required=True, metavar="THING")
    for thing, described in (
        ("request", "the life of a request: its state, its cost, its story"),
        ("block", "why a block is held, and its story"),
    ):
        one = things.add_parser(
            thing, help=described, description=described, epilog=TARGETS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        one.add_argument(
            "id", metavar="ID", help="a block's number" if thing == "block" else "a request's id, or #NUMBER"
        )
        one.add_argument("target", nargs="?", metavar="TARGET", help="where to look")
        one.add_argument("--engine", default="", help="which engine, if there are several")
        add_shared(one)
        one.set_defaults(run=_explain, thing=thing)
    drop = things.add_parser(
        "drop", help="what made usage fall or throughput vanish",
        description="Says of a window of time what every block that became free was freed for, and what the steps in it"
        " did. Without --at, of the window in which usage fell furthest.",
        epilog=TARGETS, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    drop.add_argument("target", nargs="?", metavar="TARGET", help="where to look: a recording, a stream or a service")
    drop.add_argument("--at", type=a_time, metavar="TIME", help="14:02:11 (UTC) or 2026-01-31T14:02:11Z")
    drop.add_argument("--window", type=positive, default=10.0, metavar="S", help="so many seconds around it (10)")
    drop.add_argument("--engine", default="", help="which engine, if there are several")
    drop.add_argument("--format", choices=("table", "json"), default="table", help="(default: table)")
    add_shared(drop)
    drop.set_defaults(run=_explain_drop)
    memory = things.add_parser(
        "memory", help="what a device's memory went to, and what that leaves for KV",
        description="Does the sums of an engine's memory bill again, from the figures in its log (vLLM's or kvscope's),"
        " or shows the bill of a running kvscope engine beside its device's own figures.",
        epilog=f"{TARGETS}\nexit codes: 0, 2 for a wrong command line, 3 for no bill (what is missing is named)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    memory.add_argument("target", nargs="?", metavar="TARGET", help="where to look, if not in a log")
    memory.add_argument("--log", metavar="FILE", help="an engine's log, plain or gzip")
    memory.add_argument("--format", choices=("table", "json"), default="table", help="(default: table)")
    add_shared(memory)
    memory.set_defaults(run=_explain_memory)


def _explain(parsed: argparse.Namespace) -> int:
    if parsed.thing == "block" and not parsed.id.isdecimal():
        raise ValueError(f"{parsed.id} is not the number of a block")
    observation = observe(
        parsed.target or default_url(),
        Settings.parse(parsed.thresholds),
        timeout_s=parsed.timeout,
        watch_s=min(parsed.watch_s, 1.0),
        token=parsed.token,
    )
    console = Console(highlight=False)
    try:
        query = observation.query
        engines = [view.engine for view in query.engines() if parsed.engine in ("", view.engine)]
        if not engines:
            raise NotKnown(f"there is no engine {parsed.engine!r} at {observation.target}")
        last_error: NotKnown | None = None
        for engine in engines:
            try:
                if parsed.thing == "request":
                    explain.request(query.request(engine, parsed.id), console)
                else:
                    explain.block(query.block(engine, int(parsed.id)), console)
                return NOTHING
            except NotKnown as error:
                last_error = error
        assert last_error is not None
        raise last_error
    finally:
        observation.close()


def _explain_drop(parsed: argparse.Namespace) -> int:
    observation = observe(
        parsed.target or default_url(),
        Settings.parse(parsed.thresholds),
        timeout_s=parsed.timeout,
        watch_s=parsed.watch_s,
        token=parsed.token,
    )
    try:
        query = observation.query
        engines = [view.engine for view in query.engines() if parsed.engine in ("", view.engine)]
        if not engines:
            raise NotKnown(f"there is no engine {parsed.engine!r} at {observation.target}")
        drops = [query.drop(engine, parsed.at or "", parsed.window) for engine in engines]
    finally:
        observation.close()
    if parsed.format == "json":
        print_json(drops)
    else:
        for drop in drops:
            explain.drop(drop, Console(highlight=False))
    return NOTHING


def _explain_memory(parsed: argparse.Namespace) -> int:
    if parsed.log and parsed.target:
        raise ValueError("give a TARGET or --log FILE, not both")
    if parsed.log:
        report = bill_in_log(parsed.log)
    else:
        report = bill_of_engines(
            parsed.target or default_url(),
            Settings.parse(parsed.thresholds),
            parsed.timeout,
            parsed.watch_s,
            parsed.token,
        )
    if parsed.format == "json":
        print_json(report)
    else:
        explain.memory(report, Console(highlight=False))
    if report.missing:
        raise CannotTell(f"{report.source} has no whole memory bill: {'; '.join(report.missing)}")
    return NOTHING


# -------------------------------------------------------------------- record


def _add_record(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "record",
        help="keep a stream as a recording",
        description="Writes an engine's event stream to a directory, until Ctrl-C; doctor and explain read it.",
    )
    parser.add_argument("target", metavar="TARGET", help=f"an event stream, such as {EVENTS_ENDPOINT}")
    parser.add_argument("directory", type=Path, metavar="DIR", help="a new or empty directory")
    parser.add_argument("--seconds", type=positive, default=None, metavar="S", help="stop after this long")
    parser.add_argument(
        "--timeout", type=positive, default=10.0, metavar="S", help="wait this long for the stream (10)"
    )
    parser.set_defaults(run=_record)


def _record(parsed: argparse.Namespace) -> int:
    from monitor.sources.record import record

    recorded = record(
        parsed.target, parsed.directory, seconds=parsed.seconds, timeout_s=parsed.timeout, console=Console(stderr=True)
    )
    print(f"{recorded.batches:,} batches of {recorded.engine} in {parsed.directory} ({recorded.bytes:,} bytes)")
    return NOTHING


# -------------------------------------------------------------------- probe


def _add_probe(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("probe", help="the probe that makes vLLM publish events")
    things = parser.add_subparsers(required=True, metavar="THING")
    check = things.add_parser(
        "check", help="whether a vLLM has what the probe hooks into",
        description="Looks, without starting anything, whether a vLLM has the methods that the probe wraps, and whether"
        " it would find the probe.",
        epilog="exit codes: 0 it works, 1 something that it needs is not there, 3 no vLLM there",
    )  # fmt: skip
    check.add_argument(
        "--python", default=sys.executable, metavar="PYTHON", help="the Python that has vLLM, and kvscope (this one)"
    )
    check.set_defaults(run=_probe_check)


def _probe_check(parsed: argparse.Namespace) -> int:
    command = [parsed.python, "-m", "monitor.probes.vllm.check"]
    quiet = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=quiet)
    except OSError as error:
        raise ValueError(f"--python {parsed.python} cannot be run: {error.strerror}") from error
    if not done.stdout:
        last = done.stderr.strip().splitlines()[-1:]
        raise CannotTell(
            f"{parsed.python} could not look: {' '.join(last)}. kvscope must be installed beside vLLM:"
            f" {parsed.python} -m pip install kvscope"
        )
    sys.stdout.write(done.stdout)
    return done.returncode


# -------------------------------------------------------------------- incidents


def _add_incidents(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "incidents",
        help="every fault brought about in virtual time, and what is found of it",
        description="Brings about every incident of the catalogue that kvscope's own engine can have, in virtual time,"
        " beside healthy engines under all kinds of load, and lets the monitor judge what they say. Prints recall and"
        " precision by code, and how long findings take. Exit code 1 if anything is missed, or found that is not there."
        " It needs the engine: run it from a checkout.",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="a sample: every scenario once, its clients drawn from N (0)"
    )
    parser.add_argument("--full", action="store_true", help="every scenario under five seeds, from --seed on")
    parser.add_argument(
        "--code", action="append", default=[], metavar="CODE", help="only this code's scenarios; may be repeated"
    )
    parser.add_argument(
        "--keep", type=Path, default=Path("failed-incidents"), metavar="DIR",
        help="where recordings of runs that were not right go (failed-incidents): monitor doctor and explain read them",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="processes (as many as there are cores)")
    parser.set_defaults(run=_incidents)


def _incidents(parsed: argparse.Namespace) -> int:
    try:
        from monitor.incidents import report
    except ImportError as error:
        raise ValueError(
            f"`monitor incidents` runs kvscope's own engine, which is not installed: run it from a checkout ({error})"
        ) from error
    seeds = range(parsed.seed, parsed.seed + (report.SEEDS if parsed.full else 1))
    jobs = report.jobs(seeds, parsed.code)
    runs = report.do(jobs, parsed.keep, max(parsed.jobs, 0) or report.cores(), Console(stderr=True))
    report.show(runs, Console(highlight=False, width=None if sys.stdout.isatty() else 120))
    return FINDINGS if any(run.problems for run in runs) else NOTHING


# -------------------------------------------------------------------- serve


def _repeat(text: str) -> int:
    return 0 if text == "0" else length(text)


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="the service: page, API, /metrics, alerts",
        description="Reads engines' event streams and metrics pages, and serves what they say: web page, API and"
        " /metrics on one port.",
    )
    parser.add_argument(
        "--events", action="append", metavar="ENDPOINT",
        help=f"an engine's event stream; may be repeated (default: KVSCOPE_EVENTS, else {EVENTS_ENDPOINT}, or none if"
        " --metrics is given)",
    )  # fmt: skip
    parser.add_argument(
        "--metrics", action="append", default=[], metavar="URL",
        help="the metrics page of an engine without a probe, scraped every 5 s; may be repeated",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1); elsewhere a token is needed")
    parser.add_argument("--port", type=port, default=8765, help="(8765; 0 picks a free one)")
    parser.add_argument("--token", default=os.environ.get("KVSCOPE_TOKEN", ""), help="ask for this (KVSCOPE_TOKEN)")
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("KVSCOPE_DATA"), metavar="DIR",
        help="keep alerts here, so that a restart loses none and sends none anew, and all that is heard, so that any"
        " moment of it can be asked for (KVSCOPE_DATA)",
    )  # fmt: skip
    parser.add_argument(
        "--keep-days", type=positive, default=7.0, metavar="DAYS", help="what is heard is kept for so long (7)"
    )
    parser.add_argument(
        "--keep-bytes", type=size, default=10 << 30, metavar="SIZE",
        help="and no more of it than this, the oldest goes first: 500M, 2G (10G)",
    )  # fmt: skip
    parser.add_argument(
        "--recording", type=Path, metavar="DIR", help="show this recording, and nothing else: no engine is read"
    )
    parser.add_argument(
        "--alert", action="append", metavar="URL",
        help="send alerts here: https://… (a webhook), alertmanager+http://HOST:9093, slack+https://… or"
        " pagerduty+https://ROUTING_KEY@events.pagerduty.com; may be repeated (KVSCOPE_ALERTS, separated by spaces)",
    )  # fmt: skip
    parser.add_argument(
        "--alert-private", action="store_true", help="alerts may go to private addresses, this machine's among them"
    )
    parser.add_argument(
        "--alert-repeat", type=_repeat, default=4 * 3600, metavar="TIME",
        help="say again that an alert still fires: 30m, 4h (4h; 0 never)",
    )  # fmt: skip
    parser.add_argument(
        "--webhook-secret", default=os.environ.get("KVSCOPE_WEBHOOK_SECRET", ""), metavar="whsec_…",
        help="sign what goes to webhooks with this (KVSCOPE_WEBHOOK_SECRET)",
    )  # fmt: skip
    parser.add_argument(
        "--otlp", default="", metavar="URL",
        help="send traces of requests, findings as logs, and metrics to this OTLP endpoint: grpc://HOST:4317,"
        " grpcs://… or http(s)://HOST:4318",
    )  # fmt: skip
    parser.add_argument(
        "--otlp-sample", type=float, default=1.0, metavar="SHARE",
        help="of the requests that were neither slow, preempted, stuck nor failed, trace this share (1; 0.1 a tenth)",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="CODE.NAME=VALUE", dest="thresholds", help="change a threshold"
    )
    parser.set_defaults(run=_serve)


def _serve(parsed: argparse.Namespace) -> int:
    try:
        from monitor.history.keeper import Keep
        from monitor.outlets.alerts.alerts import AlertsConfig
        from monitor.outlets.otel.outlet import OtelConfig
        from monitor.service import ServiceConfig, serve
    except ImportError as error:
        raise ValueError(
            f"`monitor serve` needs more than the base install: pip install 'kvscope[monitor]' ({error})"
        ) from error
    from dashboards.web.app import mount

    if parsed.recording is not None and (parsed.events or parsed.metrics or parsed.alert or parsed.otlp):
        raise ValueError("--recording shows what is over, and alone: leave out --events, --metrics, --alert and --otlp")
    by_default = os.environ.get("KVSCOPE_EVENTS", "" if parsed.metrics else EVENTS_ENDPOINT)
    if parsed.recording is not None:
        return serve(
            ServiceConfig(
                events=(), recording=parsed.recording, host=parsed.host, port=parsed.port, token=parsed.token,
                settings=Settings.parse(parsed.thresholds),
            ),
            mount,
        )  # fmt: skip
    return serve(
        ServiceConfig(
            events=tuple(parsed.events or filter(None, by_default.split(","))),
            metrics=tuple(parsed.metrics),
            host=parsed.host,
            port=parsed.port,
            token=parsed.token,
            alerts=AlertsConfig(
                receivers=tuple(parsed.alert or os.environ.get("KVSCOPE_ALERTS", "").split()),
                secret=parsed.webhook_secret,
                allow_private=parsed.alert_private,
                repeat_s=float(parsed.alert_repeat),
                path=parsed.data / "alerts.sqlite" if parsed.data is not None else None,
            ),
            otlp=OtelConfig(parsed.otlp, parsed.otlp_sample) if parsed.otlp else None,
            settings=Settings.parse(parsed.thresholds),
            data=parsed.data,
            keep=Keep(parsed.keep_days, parsed.keep_bytes),
        ),
        mount,
    )


# -------------------------------------------------------------------- alerts


def _add_alerts(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("alerts", help="the alerts of a running service: whether they arrive, what to hush")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    exit_codes = "exit codes: 0, 2 for a wrong command line, 3 for a service that does not answer"
    shown = actions.add_parser("list", help="receivers, open alerts, silences and the latest deliveries")
    shown.set_defaults(run=_list_alerts)
    test = actions.add_parser("test", help="send a test to one receiver, or to all, and say what it answered")
    test.add_argument("receiver", nargs="?", default="", metavar="RECEIVER", help="its name, as `list` has it")
    test.set_defaults(run=_test_alerts)
    silence = actions.add_parser(
        "silence", help="tell nobody of what matches, for a while",
        description="Alerts that match all of the patterns are not told until then. What still fires is told then.",
    )  # fmt: skip
    silence.add_argument(
        "matchers", nargs="+", metavar="NAME=PATTERN", help="code, engine, severity or key; such as 'code=leak.*'"
    )
    silence.add_argument(
        "--for", type=length, required=True, metavar="TIME", dest="seconds", help="how long: 30m, 2h, 1d12h"
    )
    silence.add_argument("--comment", default="", metavar="TEXT", help="why, for whoever looks at the list")
    silence.set_defaults(run=_silence)
    unsilence = actions.add_parser("unsilence", help="end a silence")
    unsilence.add_argument("number", type=int, metavar="NUMBER", help="as `list` has it")
    unsilence.set_defaults(run=_unsilence)
    replay = actions.add_parser("replay", help="send a message of the delivery log again, with its id")
    replay.add_argument("number", type=int, metavar="NUMBER", help="as `list` has it")
    replay.set_defaults(run=_replay)
    for action in (shown, test, silence, unsilence, replay):
        action.epilog = f"{exit_codes}; 1 if a test did not arrive" if action is test else exit_codes
        action.add_argument("--url", default="", metavar="URL", help=f"the service (KVSCOPE_URL, else {DEFAULT_URL})")
        action.add_argument(
            "--token", default=os.environ.get("KVSCOPE_TOKEN", ""), help="the service's token (KVSCOPE_TOKEN)"
        )


def _alerts(parsed: argparse.Namespace) -> AlertsClient:
    return AlertsClient(parsed.url or default_url(), parsed.token)


def _list_alerts(parsed: argparse.Namespace) -> int:
    alerts_table(_alerts(parsed).view(), Console(highlight=False))
    return NOTHING


def _test_alerts(parsed: argparse.Namespace) -> int:
    tried = _alerts(parsed).test(parsed.receiver)
    for one in tried:
        print(f"{'delivered' if one.delivered else 'NOT delivered'}  {one.receiver}  {one.answer}")
    return NOTHING if all(one.delivered for one in tried) else FINDINGS


def _silence(parsed: argparse.Namespace) -> int:
    print(f"silence {_alerts(parsed).silence(parsed.matchers, parsed.seconds, parsed.comment)}")
    return NOTHING


def _unsilence(parsed: argparse.Namespace) -> int:
    _alerts(parsed).unsilence(parsed.number)
    return NOTHING


def _replay(parsed: argparse.Namespace) -> int:
    _alerts(parsed).replay(parsed.number)
    return NOTHING
