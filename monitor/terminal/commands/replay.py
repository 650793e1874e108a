"""`monitor replay`: a recording as a live stream again."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from ...base.errors import BadTarget
from ...base.text import escaped
from ...contract.wire import ContractError
from ...history.recorder import Replayer
from ...probes.publisher import EVENTS_ENDPOINT
from ...sources.recording import Recording
from ...sources.support_bundle import unpack_events
from ...sources.targets import TargetKind, kind_of


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    parser.description = (
        "Publishes a recording as its engine did, with its times moved to now, so that a service,"
        " `monitor doctor` or any other reader can attach. It stops at the end of the recording."
    )
    parser.add_argument("recording", type=Path, metavar="RECORDING", help="a directory, one segment of it, or a bundle")
    parser.add_argument("--speed", type=_speed, default=1.0, metavar="N", help="speed factor (default: 1)")
    parser.add_argument(
        "--events", default=EVENTS_ENDPOINT, metavar="ENDPOINT", help=f"where to publish (default: {EVENTS_ENDPOINT})"
    )
    parser.add_argument(
        "--replay",
        default="",
        metavar="ENDPOINT",
        help="where to answer requests for past events (default: the port after --events)",
    )
    parser.set_defaults(run=_replay_recording)


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a speed: 1 is the original speed, 10 is ten times as fast")
    return speed


def _replay_recording(parsed: argparse.Namespace) -> int:
    kind = kind_of(str(parsed.recording))
    if kind is TargetKind.BUNDLE:
        with tempfile.TemporaryDirectory(prefix="kvscope-replay-") as folder:
            unpack_events(parsed.recording, Path(folder))
            return _publish(Path(folder), parsed)
    if kind is not TargetKind.RECORDING:
        raise BadTarget(f"{parsed.recording} is not a recording: `monitor record TARGET DIR` makes one")
    return _publish(parsed.recording, parsed)


def _publish(recording: Path, parsed: argparse.Namespace) -> int:
    try:
        replayer = Replayer(Recording(recording), parsed.events, parsed.replay, parsed.speed)
    except ContractError as error:
        raise BadTarget(str(error)) from error
    print(f"{parsed.recording} is published on {replayer.events_endpoint}", file=sys.stderr, flush=True)
    try:
        engine = ""
        for frame in replayer.run():
            engine = frame.engine
    finally:
        replayer.close()
    print(f"{replayer.published:,} batches of {escaped(engine)}: the recording is over", file=sys.stderr)
    return 0
