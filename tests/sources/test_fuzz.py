"""What engines and people wrote, damaged in every way that chance finds: no reader falls over, hangs or grows.

Each input goes the whole road, to judgement. Ten seconds a reader with `make slow`, two minutes with `make prove`.
"""

from __future__ import annotations

import gzip
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import FrameType

import psutil
import pytest

from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.doctor.facts_text import kv_events_in_words
from kvscope.monitor.doctor.observe import observe
from kvscope.monitor.errors import BadTarget, CannotTell
from kvscope.monitor.events.samples import KvEvents
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.sources.kv_events import NotKvEvents, decode_kv_events
from tests.sources.kv_publisher import encoded, recorded

DATA = Path(__file__).parent.parent / "data"
PATIENCE_S = 30
"""Nobody's input takes a reader this long, but one that it hangs on."""
MAX_GROWTH = 32 << 20
TOKENS = (
    b"Avg prompt throughput: ",
    b" tokens/s",
    b"Running: ",
    b" reqs, Waiting: ",
    b"KV cache usage: ",
    b"Engine 000: ",
    b" Engines Aggregated: ",
    b"non-default args: {'",
    b"': '",
    b"GiB",
    b"Maximum concurrency for ",
    b'{"message": "',
    b'{"log": ',
    b"12-31 23:59:59 ",
    b"0000-00-00T99:99:99+99:99 ",
    b"vllm serve ",
    b"vllm bench serve ",
    b" cache ",
    b"--max-concurrency ",
    b"--input-len ",
    b"--output-len ",
    b"100%",
    b"9" * 5000,
    b"1e999",
    b"-1",
    b"0",
    b"1.2.3",
    b"nan",
    b"\n",
    b"\r",
    b"\\\n",
    b"\x00",
    b"\xff\xfe",
    b"{" * 5000,
    b"\xe2\x96\x88" * 5000,
    b"\x93\x92\xcf",
    b"\xdf\xff\xff\xff\xff",
    b"\x91" * 2000,
    b"vllm:",
    b'{engine="',
    b"} ",
)


def damaged(inputs: list[bytes], rng: random.Random) -> bytes:
    """One of the inputs after a few of: bytes changed, a part cut out, doubled, or from another, a token put in."""
    data = bytearray(rng.choice(inputs))
    for _ in range(rng.choice((0, 1, 1, 2, 4, 16))):
        start, length = rng.randrange(len(data) + 1), round(rng.paretovariate(0.7))
        match rng.randrange(6):
            case 0:
                for _ in range(min(length, 50)):
                    if data:
                        data[rng.randrange(len(data))] = rng.randrange(256)
            case 1:
                del data[start : start + length]
            case 2:
                data[start:start] = data[start : start + length]
            case 3:
                other = rng.choice(inputs)
                at = rng.randrange(len(other))
                data[start : start + length] = other[at : at + length]
            case 4:
                data[start:start] = rng.choice(TOKENS)
            case _:
                del data[start:]
        del data[1 << 20 :]
    return bytes(data)


# -------------------------------------------------------------------- readers: what came of an input, in a word


def judged(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    try:
        observation = observe(str(path), Settings())
    except (CannotTell, BadTarget) as error:
        return type(error).__name__ if str(error).startswith(str(path)) else "unnamed"
    assert observation.query.engines()
    observation.query.findings()
    return observation.kind.value


def pasted() -> list[bytes]:
    """The public reports of tests/data."""
    return [path.read_bytes() for path in sorted(DATA.glob("reports/*/report.txt"))]


def logs(tmp_path: Path) -> Iterator[tuple[list[bytes], Callable[[bytes], str]]]:
    """Plain, and as what is damaged before it is unpacked."""
    zipped = [path.read_bytes() for path in sorted(DATA.glob("*.log.gz"))]
    plain = [b"".join(gzip.decompress(data).splitlines(True)[-150:]) for data in zipped]
    plain += [path.read_bytes() for path in sorted(DATA.glob("*.log"))]
    plain += pasted()
    yield plain * 3 + zipped, lambda content: judged(tmp_path / "a.log", content)


def reports(tmp_path: Path) -> Iterator[tuple[list[bytes], Callable[[bytes], str]]]:
    inputs = [(DATA / name).read_bytes() for name in ("seed-001.txt", "seed-002.log")]
    inputs += pasted()
    yield inputs, lambda content: judged(tmp_path / "a.txt", content)


def kv_events(tmp_path: Path) -> Iterator[tuple[list[bytes], Callable[[bytes], str]]]:
    inputs = [encoded(batch, wire) for batch in recorded("kv-events") for wire in ("arrays", "maps")]
    watch = Pipeline()
    count = iter(range(1 << 62))

    def read(content: bytes) -> str:
        try:
            at_ns, events, rank = decode_kv_events(content)
        except NotKvEvents as error:
            return "NotKvEvents" if str(error) else "unnamed"
        watch.feed([KvEvents(f"vllm@here/{rank % 4}", str(next(count)), at_ns, events)])
        watch.settle()
        assert kv_events_in_words(watch.fleet.engines.values())
        return "read"

    yield inputs, read


def pages(tmp_path: Path) -> Iterator[tuple[list[bytes], Callable[[bytes], str]]]:
    page = gzip.decompress((DATA / "metrics-page.prom.gz").read_bytes())
    from kvscope.monitor.sources.metrics_page import BadPage, MetricsPage

    body = b""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    def read(content: bytes) -> str:
        nonlocal body
        body = content
        source = MetricsPage(f"http://127.0.0.1:{server.server_port}/metrics")
        watch = Pipeline()
        try:
            watch.feed(source.scrape())
            watch.settle()
        except BadPage as error:
            return "BadPage" if source.url in str(error) else "unnamed"
        finally:
            source.close()
        assert watch.engines()
        return "read"

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield [page], read
        finally:
            server.shutdown()
            thread.join()


READERS = {
    logs: {"log", "CannotTell", "BadTarget"},
    reports: {"prose", "CannotTell"},
    kv_events: {"read", "NotKvEvents"},
    pages: {"read", "BadPage"},
}
"""Each with what has to have come of some of its inputs."""


@pytest.fixture
def patience() -> Iterator[Callable[[str], None]]:
    """Call it at each input: one that takes for ever then fails, and is named."""
    what = ""

    def too_long(_: int, __: FrameType | None) -> None:
        raise AssertionError(f"{what} took more than {PATIENCE_S} s")

    def begin(name: str) -> None:
        nonlocal what
        what = name
        signal.alarm(PATIENCE_S)

    before = signal.signal(signal.SIGALRM, too_long)
    yield begin
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "seconds", [pytest.param(10.0, marks=pytest.mark.slow), pytest.param(120.0, marks=pytest.mark.prove)]
)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_damaged_input(
    reader: Callable[[Path], Iterator[tuple[list[bytes], Callable[[bytes], str]]]],
    seconds: float,
    tmp_path: Path,
    patience: Callable[[str], None],
) -> None:
    came_of_it: Counter[str] = Counter()
    process = psutil.Process()
    resident = 0
    opened = reader(tmp_path)
    inputs, read = next(opened)
    started = time.monotonic()
    try:
        while (taken := time.monotonic() - started) < seconds:
            number = came_of_it.total()
            name = f"{reader.__name__} {number}"
            content = damaged(inputs, random.Random(name))
            patience(name)
            try:
                came_of_it[read(content)] += 1
            except Exception as error:
                raise AssertionError(f"{name} was fallen over: {content[:300]!r}…") from error
            if not resident and taken > seconds / 2:
                resident = process.memory_info().rss
    finally:
        opened.close()
    print(f"{reader.__name__}: {dict(came_of_it)}")
    assert set(came_of_it) >= READERS[reader]
    assert not came_of_it["unnamed"]
    assert process.memory_info().rss - resident <= MAX_GROWTH
