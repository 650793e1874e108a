"""The engine's command line: kvscope engine serve, kvscope engine bench."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import uvicorn
import zmq

from kvscope.monitor.base.bounded_server import BoundedConfig
from kvscope.monitor.base.process_limits import collect_rarely, raise_file_limit
from kvscope.monitor.probes.publisher import ENGINE_RING_BYTES, EVENTS_ENDPOINT, NotPrivate, replay_endpoint_for

from .bench.load_bench import BenchLoad, bench_offline, bench_over_http, print_bench_report, summarize_clients
from .config import AUTO, DEFAULT_KV_BYTES, DTYPES, KV_CONNECTORS, SCHEDULING_POLICIES, TINY, EngineConfig
from .faults import PLACES

if TYPE_CHECKING:
    from .core.engine_core import EngineCore

EXIT_USAGE = 2
INTERRUPTED = 130
DEFAULT_CONFIG = EngineConfig()
SIZES: Final = {
    **{letter: 1000**power for power, letter in enumerate("kmgt", 1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", 1)},
}
"""As vLLM reads them: k is 1000 and K is 1024, and so on."""
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)")
logger = logging.getLogger(__name__)


class Parser(argparse.ArgumentParser):
    """Suggests similar flags for an unknown one. Flags are not abbreviated."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does, and exits with a line for the flags that it left over."""
        parsed, left = super().parse_known_args(args, namespace)
        unknown = [text.partition("=")[0] for text in left if text.startswith("-")]
        if unknown:
            self.error("; ".join(map(self._unknown, unknown)))
        return parsed, left

    def _unknown(self, flag: str) -> str:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        near = difflib.get_close_matches(flag.replace("_", "-"), known)
        return f"there is no {flag}" + (f": did you mean {' or '.join(near)}?" if near else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name. Return the exit code."""
    parsed = engine_parser().parse_args(arguments)
    _set_up_logging()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return serve_engine(parsed) if parsed.command == "serve" else run_bench(parsed)
    except (ValueError, OSError, NotPrivate, zmq.ZMQError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 0 if parsed.command == "serve" else INTERRUPTED


def serve_engine(parsed: argparse.Namespace) -> int:
    """Serve until stopped. Raises ValueError, OSError, NotPrivate or ZMQError for what cannot be started."""
    config = config_of(parsed)
    raise_file_limit()
    listener = _listen(parsed.host, parsed.port)
    port = listener.getsockname()[1]
    address = f"[{parsed.host}]:{port}" if ":" in parsed.host else f"{parsed.host}:{port}"
    engine = parsed.engine_id or f"{config.served_model_name}@{address}/0"
    settings = {name: getattr(config, name) for name in config.__dataclass_fields__ if name != "hash_key"}
    changed = {name: value for name, value in settings.items() if value != getattr(DEFAULT_CONFIG, name)}
    named = {"served_model_name": config.served_model_name, "host": parsed.host, "port": port}
    logger.info("non-default args: %s", changed | named)
    # Only now, since torch takes seconds to import: errors in the command line are reported at once.
    from .core.assembly import EventStream
    from .core.engine_core import EngineCore
    from .models import load_model

    stream = None
    if not parsed.no_stream:
        replay = parsed.replay or replay_endpoint_for(parsed.events)
        stream = EventStream(engine, parsed.events, replay, parsed.journal, round(parsed.replay_mib * 2**20))
    with listener:
        core = EngineCore(config, load_model(config), stream, stall_s=parsed.stall_seconds)
        try:
            _log_pool_size(core)
            collect_rarely()  # else collections walk torch's objects, 0.3 s each; vLLM freezes its heap, too
            _Server(core, engine, address).run(sockets=[listener])
        finally:
            core.close()
    return 1 if core.failure else 0


def run_bench(parsed: argparse.Namespace) -> int:
    """Run the load and report its results. Raises ValueError for what cannot be asked."""
    load = BenchLoad(**{name: getattr(parsed, name) for name in BenchLoad.__dataclass_fields__})
    config = config_of(parsed)
    if parsed.journal is not None and parsed.simulate is None:
        raise ValueError("--journal is for --simulate: a server keeps its events with its own --journal")
    if parsed.simulate is not None:
        logging.getLogger().setLevel(logging.WARNING)
        logging.getLogger("kvscope.engine.core.watchdog").setLevel(logging.ERROR)  # its lines would bear today's time
        from .bench.simulated_bench import bench_simulated

        made = summarize_clients(bench_simulated(load, config, parsed.simulate, parsed.journal))
    elif parsed.offline:
        logging.getLogger().setLevel(logging.WARNING)
        made = summarize_clients(asyncio.run(bench_offline(load, config)))
    elif config != EngineConfig(seed=parsed.seed, hash_key=config.hash_key):
        raise ValueError("an engine's settings are for --offline and --simulate: the one at --base-url has its own")
    else:
        made = summarize_clients(asyncio.run(bench_over_http(load, parsed.base_url)))
    print_bench_report(made, parsed.format)
    return 1 if made.requests["failed"] else 0


class _Server(uvicorn.Server):
    """Prints where it listens, and ends the engine's requests before it waits for its connections to end."""

    def __init__(self, core: EngineCore, engine: str, address: str) -> None:
        from .serving.server import ENGINE_LIMITS, create_engine_app

        app = create_engine_app(core, engine, self._stop)
        super().__init__(
            BoundedConfig(
                app,
                ENGINE_LIMITS,
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=2,
            )
        )
        self._core = core
        self._address = address

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        publisher = self._core.publisher
        name = self._core.config.served_model_name
        events = "events off"
        if publisher is not None:
            events = f"events on {publisher.events_endpoint}, replay on {publisher.replay_endpoint}"
        print(f"kvscope engine {name} listening on http://{self._address}, {events}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._core.refuse_all()
        super().handle_exit(sig, frame)

    def _stop(self) -> None:
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded, so that a port in use is reported at once."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        message = f"cannot listen on {host}:{port}: {reason}. Choose another --port (0 picks a free one)"
        raise ValueError(message) from error


def _log_pool_size(core: EngineCore) -> None:
    """Log the size of the pool, in vLLM's words."""
    # On models with a sliding window a block of tokens is a block in each KV group, or soon in one only.
    concurrency = core.pool.usable / core.manager.blocks_for(core.max_model_len)
    tokens = round(concurrency * core.max_model_len)
    logger.info("%s KV cache size: %s tokens", core.config.device.upper(), f"{tokens:,}")
    logger.info("Maximum concurrency for %s tokens per request: %.2fx", f"{core.max_model_len:,}", concurrency)


def config_of(parsed: argparse.Namespace) -> EngineConfig:
    """Return the settings that the command line gives. Raises ValueError."""
    names = EngineConfig.__dataclass_fields__.keys() & vars(parsed).keys()
    given = {name: getattr(parsed, name) for name in names} | {"model": parsed.model_tag or parsed.model}
    return EngineConfig(**given, faults=tuple(parsed.fault), hash_key=parsed.hash_key_text.encode())


def _set_up_logging() -> None:
    """Lines as vLLM's are, but with the year, and in UTC."""
    handler = logging.StreamHandler()
    form = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
    formatter = logging.Formatter(form, "%Y-%m-%d %H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def engine_parser() -> argparse.ArgumentParser:
    """Return the whole command line, from which the reference is made."""
    whole = Parser(prog="kvscope engine", description="kvscope's paged-attention engine.")
    commands = whole.add_subparsers(dest="command", required=True)
    serving = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description=("Serves a model with OpenAI's API and publishes its events."),
    )
    _model_flags(serving)
    _serving_flags(serving)
    benching = commands.add_parser(
        "bench",
        help="put a load on an engine",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Puts a load on an engine and reports what its clients see. Prompts are random tokens. Answers"
        " are\ngreedy and of full length. Exit codes: 0, 1 if a request failed, 2 usage.",
    )
    _load_flags(benching)
    _model_flags(benching.add_argument_group("the engine of --offline and --simulate"))
    return whole


def _model_flags(command: argparse._ActionsContainer) -> None:
    """Add the settings of an engine, wherever it runs."""
    add = command.add_argument
    model = command.add_mutually_exclusive_group()
    model_help = f"{TINY}, or a Hugging Face directory (default: {TINY})"
    model.add_argument("model_tag", nargs="?", metavar="MODEL", help=model_help)
    model.add_argument("--model", default=DEFAULT_CONFIG.model, metavar="MODEL", help="the same, as a flag")
    add("--device", default=AUTO, help="cpu, cuda or cuda:N (default: a GPU where there is one)")
    dtype_help = "type of weights and KV (default: the checkpoint's own on a GPU, float32 on the CPU)"
    add("--dtype", default=AUTO, choices=DTYPES, help=dtype_help)
    _add_size(command, "--block-size", int, "TOKENS", "tokens in a block")
    _pool_flags(command)
    _scheduling_flags(command)


def _add_size(
    command: argparse._ActionsContainer, flag: str, kind: Callable[[str], float], metavar: str, text: str
) -> None:
    """Add a flag for the setting of that name, and name its default in the help unless that is None."""
    default = getattr(DEFAULT_CONFIG, flag.removeprefix("--").replace("-", "_"))
    shown = "" if default is None else f" (default: {default})"
    command.add_argument(flag, type=kind, default=default, metavar=metavar, help=text + shown)


def _pool_flags(command: argparse._ActionsContainer) -> None:
    """Memory, and what a step and a request may take of it."""
    _add_size(command, "--num-gpu-blocks-override", int, "N", "blocks of the pool, including the reserved one")
    command.add_argument(
        "--kv-cache-memory-bytes",
        "--kv-cache-memory",
        type=parse_size,
        default=None,
        metavar="BYTES",
        help="size of the pool, unless --num-gpu-blocks-override sets it (default: the memory that is left, or"
        f" {DEFAULT_KV_BYTES} on the CPU without a budget)",
    )
    share_help = "share of the device's memory, or of --memory-budget, that the engine uses"
    _add_size(command, "--gpu-memory-utilization", float, "SHARE", share_help)
    budget_help = "on the CPU: memory limit of the whole process (default: no limit)"
    _add_size(command, "--memory-budget", parse_size, "BYTES", budget_help)
    length_help = "maximum length of a prompt with its output (default: the model's)"
    _add_size(command, "--max-model-len", parse_size, "TOKENS", length_help)
    _add_size(command, "--max-num-seqs", int, "N", "maximum number of requests in a step")
    _add_size(command, "--max-num-batched-tokens", parse_size, "N", "maximum number of tokens in a step")


def _scheduling_flags(command: argparse._ActionsContainer) -> None:
    """How steps are planned, what is kept outside the pool, and what is broken on purpose."""
    add = command.add_argument
    add(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=DEFAULT_CONFIG.async_scheduling,
        help="plan a step while the previous one runs (default: no)",
    )
    add(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        default=DEFAULT_CONFIG.enforce_eager,
        help="capture no CUDA graphs of decodes. On the CPU, --no-enforce-eager pads decodes as graphs would",
    )
    policy = DEFAULT_CONFIG.scheduling_policy
    add("--scheduling-policy", default=policy, choices=SCHEDULING_POLICIES, help=f"(default: {policy})")
    add("--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_false", help="never reuse a prefix")
    add("--kv-connector", default="", choices=[name for name in KV_CONNECTORS if name], help="keep KV outside the pool")
    add(
        "--kv-lease-seconds",
        type=float,
        default=None,
        metavar="S",
        help="reclaim a finished request's blocks from the connector after this long. 0 waits until it is done"
        " (default: 30 for peer, 0 for host)",
    )
    add(
        "--kv-transfer-endpoint",
        default=DEFAULT_CONFIG.kv_transfer_endpoint,
        metavar="ENDPOINT",
        help="endpoint where another engine can fetch KV, with --kv-connector peer (default:"
        f" {DEFAULT_CONFIG.kv_transfer_endpoint})",
    )
    add(
        "--fault",
        action="append",
        default=[],
        metavar="CODE[:key=value]…",
        help=f"break one mechanism on purpose (repeatable): {', '.join(PLACES)}",
    )
    add("--seed", type=int, default=DEFAULT_CONFIG.seed, help=f"(default: {DEFAULT_CONFIG.seed})")
    add(
        "--hash-key",
        dest="hash_key_text",
        default=os.environ.get("KVSCOPE_HASH_KEY", ""),
        metavar="KEY",
        help="key of the prefix hashes (default: KVSCOPE_HASH_KEY, else random)",
    )


def _serving_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags for the server's address and for its event stream."""
    environment = os.environ.get
    add = command.add_argument
    add("--served-model-name", default="", metavar="NAME", help="name of the model for clients (default: its own)")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="0 picks a free port (default: 8000)")
    add(
        "--stall-seconds",
        type=_positive,
        default=30.0,
        metavar="S",
        help="seconds without progress that count as a stall (default: 30)",
    )
    add(
        "--events",
        default=environment("KVSCOPE_EVENTS", EVENTS_ENDPOINT),
        metavar="ENDPOINT",
        help=f"where to publish events. A port of * picks a free one (default: KVSCOPE_EVENTS, else {EVENTS_ENDPOINT})",
    )
    add(
        "--replay",
        default=environment("KVSCOPE_REPLAY", ""),
        metavar="ENDPOINT",
        help="where to answer requests for past events (default: KVSCOPE_REPLAY, else the port after --events)",
    )
    add(
        "--replay-mib",
        type=_positive,
        default=ENGINE_RING_BYTES / 2**20,
        metavar="N",
        help=f"MiB of past events to keep in memory for readers (default: {ENGINE_RING_BYTES >> 20})",
    )
    add("--journal", type=Path, default=None, metavar="DIR", help="also write the events to this directory")
    add("--no-stream", action="store_true", help="publish no events")
    add(
        "--engine-id",
        default=environment("KVSCOPE_ENGINE_ID", ""),
        metavar="ID",
        help="the engine's id in the stream (default: KVSCOPE_ENGINE_ID, else NAME@HOST:PORT/0)",
    )


def _load_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags of the load, in the words of `vllm bench serve`, and of its prompts."""
    defaults = BenchLoad()
    asked = command.add_mutually_exclusive_group(required=True)
    asked.add_argument("--base-url", metavar="URL", help="a server with OpenAI's API, such as http://127.0.0.1:8000")
    asked.add_argument("--offline", action="store_true", help="an engine in this process, without HTTP")
    asked.add_argument(
        "--simulate",
        type=_positive,
        default=None,
        metavar="S",
        help="an engine in this process for this many seconds of virtual time. A formula gives the duration of steps",
    )
    add = command.add_argument
    for flag, default in (
        ("--num-prompts", defaults.num_prompts),
        ("--input-len", defaults.input_len),
        ("--output-len", defaults.output_len),
    ):
        add(flag, type=parse_size, default=default, metavar="N", help=f"(default: {default})")
    add(
        "--request-rate",
        type=float,
        default=defaults.request_rate,
        metavar="R",
        help="requests per second of a Poisson process (default: inf, all at once)",
    )
    add(
        "--max-concurrency",
        type=parse_size,
        default=None,
        metavar="C",
        help="maximum number of concurrent requests. Latencies exclude the wait for a free place (default: no limit)",
    )
    add(
        "--prefix-len",
        type=parse_size,
        default=defaults.prefix_len,
        metavar="TOKENS",
        help="length of a prefix that all prompts share, in front of --input-len (default: 0)",
    )
    add(
        "--timeout",
        dest="timeout_s",
        type=float,
        default=defaults.timeout_s,
        metavar="S",
        help="seconds after which a client without its complete answer disconnects (default: inf)",
    )
    add(
        "--disconnect",
        type=float,
        default=defaults.disconnect,
        metavar="SHARE",
        help="share of clients that disconnect during their answer (default: 0)",
    )
    add("--journal", type=Path, default=None, metavar="DIR", help="with --simulate: write the events to this directory")
    add("--format", choices=("table", "json"), default="table", help="(default: table)")


def parse_size(text: str) -> int:
    """Parse a size: 65536, 64K (of 1024) or 65.536k (of 1000). Raise ArgumentTypeError if it is not a whole number."""
    match = _SIZE.fullmatch(text)
    if match is None:
        message = f"{text!r} is not a size: give a number such as 65536, 64K (of 1024) or 64k (of 1000)"
        raise argparse.ArgumentTypeError(message)
    value = Decimal(match[1]) * SIZES.get(match[2], 1)
    if (match[2].isupper() and "." in match[1]) or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not whole: fractions go with k, m, g and t only, such as 25.6k")
    return int(value)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
