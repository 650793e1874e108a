"""Bounds on every input, in one place. docs/limits.md lists them with what happens beyond each.

Bytes are bytes, and times are seconds unless the name has another unit. A bound lies well beyond what engines are known
to do, so that only damaged or hostile input meets it.
"""

from __future__ import annotations

from typing import Final

# ---------------------------------------------------------------- the replay socket of an engine

REQUEST_BYTES: Final = 4_096
"""Any message to an engine's sockets. ZeroMQ disconnects the peer that sends a longer one."""
QUESTION_BYTES: Final = 64
"""One question to the replay socket."""
QUESTIONS_PER_TURN: Final = 8
"""Questions that the drain thread takes each time it drains the log."""
REPLY_BYTES: Final = 4 << 20
"""One answer of batches, except the last of them. The client asks again for more."""
UNREAD_ANSWERS: Final = 1
"""Answers that wait for one client of the replay socket, beside the one that is being sent to it."""
CLIENT_BYTES_PER_S: Final = 32 << 20
"""Answers to one client of the replay socket, with bursts of two seconds' worth."""
ALL_CLIENTS_BYTES_PER_S: Final = 128 << 20
"""Answers to all clients of the replay socket together."""
KEYFRAME_INTERVAL_NS: Final = 1_000_000_000
"""A keyframe made for the replay socket answers every question of the next second."""
KEYFRAME_WAIT_NS: Final = 4_000_000_000
"""The longest that a client waits for its next keyframe: the wait doubles from one second with each that it is sent."""
SUBSCRIBER_MESSAGES: Final = 100
"""Published batches that wait for one subscriber, five seconds of them. The replay socket has those that it then
misses.
"""
UNREAD_MESSAGES: Final = 200
"""Published batches that wait in a reader that is behind, ten seconds of them. It asks the replay socket for those
beyond."""
BATCHES_BEHIND_GAP: Final = 1_000
"""Published batches that wait in a reader for a gap before them. It asks the replay socket for those beyond."""

# ---------------------------------------------------------------- frames of an event stream, a recording or a bundle

FRAME_BYTES: Final = 1 << 27
"""One frame. A keyframe of the largest pool has 24 bytes a block."""
POOL_BLOCKS: Final = 1 << 22
"""Blocks of one pool. A frame that names a larger one is refused."""
BLOCK_TOKENS: Final = 1 << 20
"""Tokens of one block, at least 1."""
ENGINE_NAME_CHARS: Final = 1_024
"""An engine's name. A frame with a longer one is refused."""
REQUEST_ID_CHARS: Final = 1_024
"""A request's id. The rest of a longer one is cut off."""
DESCRIPTION_CHARS: Final = 1 << 18
"""An engine's description, and any text that belongs to no request. The rest is cut off."""
DESCRIPTION_DEPTH: Final = 16
"""Nested objects and lists of an engine's description. A deeper one is refused, and its frame with it."""
BLOCK_HOLDERS: Final = 1 << 13
"""Owners of one block that are kept by number, and as many former owners. Further ones are an anomaly: the ledger
counts their references, and the state is in doubt."""
ENGINE_LEDGER_REQUESTS: Final = 1 << 17
"""Requests of one engine that have not ended, or whose blocks are held. A batch that names further ones is reported as
lost, a keyframe with more is refused."""
STATE_NAMES: Final = 1 << 8
"""Numbers of statuses, causes and holders in a keyframe: a newer engine may have more of them than are known."""
TIME_NS: Final = 1 << 62
"""Times, epochs and sequences of a frame, which are not below 0: until the year 2116."""

# ---------------------------------------------------------------- what unpacks: bundles, zips, gzip

LOG_RATIO: Final = 30
"""A packed log, gzip or in a zip, unpacks to so many times its packed size, and LOG_SLACK_BYTES more. Reading ends
there, with a note."""
LOG_SLACK_BYTES: Final = 32 << 20
"""Beside that."""
BUNDLE_RATIO: Final = 100
"""The same for each segment of a bundle. A bundle beyond it is refused."""
BUNDLE_SLACK_BYTES: Final = 256 << 20
"""Beside that: keyframes of large idle pools are nearly all zeros."""
BUNDLE_BYTES: Final = 4 << 30
"""Events in a bundle, unpacked."""
BUNDLE_SEGMENTS: Final = 1_000
"""Segments of a bundle, one for each epoch of an engine. A bundle with more is refused."""
LINE_CHARS: Final = 1 << 20
"""A line of a log or a report. The rest of a longer one is left out, with a note."""
ARCHIVE_MEMBERS: Final = 10_000
"""Members of a bundle or zip. One with more is refused."""

# ---------------------------------------------------------------- answers of HTTP servers

ANSWER_BYTES: Final = 64 << 20
"""The body of a metrics page or a query's answer. Compressed bodies and redirects are refused. The timeout of a command
covers the whole exchange, from connecting to the last byte."""
SERVICE_ANSWER_BYTES: Final = 512 << 20
"""The body of a kvscope service's answer to a command or to `kvscope.connect`: events of long windows are long."""
PAGE_ENGINES: Final = 64
"""Engines of one metrics page. More are left out, and the source reports how many."""
SOURCES: Final = 512
"""Sources that one service reads, or what its file descriptors allow if that is less. Further ones are refused until
others leave."""
TARGET_LIST_BYTES: Final = 4 << 20
"""A list of targets that a discovery reads: a file, or one answer of a server."""
GONE_S: Final = 900
"""An engine known by metrics alone leaves the ledger when no source has had it for so many seconds."""
GONE_STREAM_S: Final = 86_400
"""The same for an engine known by its event stream."""

# ---------------------------------------------------------------- configuration files

CONFIGURATION_BYTES: Final = 1 << 20
"""A configuration file. A longer one is refused."""

# ---------------------------------------------------------------- file descriptors, threads and memory of a process

SOURCE_FILES: Final = 6
"""File descriptors of a source: two sockets, two connections, a segment of the history, and one in reserve."""
SERVICE_FILES: Final = 128
"""File descriptors of a service without sources and clients. An idle one has 25, and questions about the past more."""
ENGINE_FILES: Final = 128
"""File descriptors of an engine without clients. An idle one has 30, and each reader of its stream one or two more."""
SOURCE_THREADS: Final = 1
"""Threads of a source."""
SERVICE_THREADS: Final = 256
"""Threads of a service without sources. An idle one has 6, questions have 40, and DuckDB and Arrow one a core each."""
SOURCE_MEMORY_MIB: Final = 16
"""Memory to plan for a source, with the ledger of its engine: 9 MiB of records, and what waits to be read."""
SERVICE_MEMORY_MIB: Final = 256
"""Memory to plan for a service without sources. An idle one has 160."""
CONNECTIONS_LEFT: Final = 64
"""HTTP connections for which sources leave file descriptors. The rest of the descriptors is for connections, too."""

# ---------------------------------------------------------------- requests to HTTP servers of kvscope

HEADER_BYTES: Final = 64 << 10
"""The request line and headers of a request. A longer header is answered with 431."""
HEADER_S: Final = 10.0
"""From the first byte of a request, or from connecting, to the end of its headers. Then the connection is closed."""
BODY_S: Final = 30.0
"""From there to the end of the body. Then the connection is closed."""
SERVICE_BODY_BYTES: Final = 1 << 20
"""The body of a request to `monitor serve`, or one message of a WebSocket. A longer body is answered with 413."""
SERVICE_BODIES_BYTES: Final = 64 << 20
"""All bodies that `monitor serve` is receiving. A request that would exceed it is answered with 503."""
SERVICE_CONNECTIONS: Final = 512
"""Connections to `monitor serve`, or the file descriptors that the service and its sources leave if those are fewer.
One more takes the place of the connection that has waited longest for its client."""
SERVICE_REQUESTS: Final = 256
"""Requests that `monitor serve` answers at once, half as many as connections. Further ones are answered with 503, but
`/healthz` as always."""
SERVICE_WEBSOCKETS: Final = 128
"""WebSockets of `monitor serve`, one for each browser, a quarter as many as connections. A further one is refused with
403."""
ENGINE_BODY_BYTES: Final = 16 << 20
"""The body of a request to the engine. A longer one is answered with 413."""
ENGINE_BODIES_BYTES: Final = 1 << 30
"""All bodies that the engine is receiving. A request that would exceed it is answered with 503."""
ENGINE_CONNECTIONS: Final = 16_384
"""Connections to the engine, or the file descriptors that it leaves itself if those are fewer."""
ENGINE_REQUESTS: Final = 8_192
"""Requests that the engine takes at once, half as many as connections. Further ones are answered with 503, `/health`
and `/metrics` as always."""
SESSIONS: Final = 256
"""Sessions of browsers. One more ends the oldest."""
SESSION_S: Final = 604_800
"""From opening a page with `?token=` to the end of the browser's session: seven days."""

# ---------------------------------------------------------------- SQL over the history

SQL_CHARS: Final = 100_000
"""The text of a query."""
SQL_AT_ONCE: Final = 1
"""Queries of hubs that one agent runs at once, each in a process. One more waits, further ones are refused."""
SQL_MEMORY_BYTES: Final = 512 << 20
"""What DuckDB may hold for a query of a hub. It writes what is beyond to SQL_SPILL_BYTES of disk."""
SQL_COMMAND_MEMORY_BYTES: Final = 2 << 30
"""The same for `monitor sql`."""
SQL_OVERHEAD_BYTES: Final = 768 << 20
"""Address space of a query's process beside that: the interpreter, its libraries, and rows on their way out."""
SQL_THREADS: Final = 2
"""Threads of one query."""
SQL_ANSWER_BYTES: Final = 32 << 20
"""The rows of an answer, encoded. A longer answer is refused, `monitor sql --max-bytes` allows more."""
SQL_SPILL_BYTES: Final = 1 << 30
"""Disk that DuckDB may take for one query, and any file of it."""

# ---------------------------------------------------------------- the bus (NATS JetStream)

BUS_PAYLOAD_BYTES: Final = 1 << 18
"""One message. A longer one is sent without the requests and blocks that it lists, or without its configuration."""
BUS_SPOOL_BYTES: Final = 64 << 20
"""Messages that wait under `--data` while NATS is away, about an hour of 50 engines. Beyond it the oldest points are
dropped first, then what else is oldest. `kvscope_bus_dropped_total` counts what was dropped, `/healthz` shows it."""
BUS_SHARED_ENGINES: Final = 1_000
"""Engines that one agent names with `--nats-share`. More are refused at the start."""
BUS_FINDINGS: Final = 100_000
"""Findings that a reader of the bus keeps, the resolved ones that are oldest go first."""
BUS_TENANT_ENGINES: Final = 4_000
"""Engines of a tenant that a hub shows, four times the largest fleet that was measured (docs/scale-out.md): the page of
10,000 took 5 s. Messages about further ones are refused, counted and reported."""
BUS_AGENT_ENGINES: Final = BUS_SHARED_ENGINES
"""Engines of one agent that a hub shows, as many as an agent shares at most. So no agent fills a hub alone."""
BUS_ANSWER_BYTES: Final = 32 << 20
"""An agent's answer to a question of a hub, sent in parts. A longer one is refused: ask for a shorter window."""
BUS_AGENT_QUESTIONS: Final = 64
"""Questions that wait for one agent or are being answered, four at a time. It refuses further ones."""
HUB_QUESTIONS: Final = 128
"""Questions that one hub has sent to agents and that are not answered yet. Further ones are refused."""
HUB_ANSWERS_BYTES: Final = 256 << 20
"""Parts of answers that one hub holds at once. An answer that would exceed it is given up."""
