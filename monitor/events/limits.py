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
ARCHIVE_MEMBERS: Final = 10_000
"""Members of a bundle or zip. One with more is refused."""

# ---------------------------------------------------------------- answers of HTTP servers

ANSWER_BYTES: Final = 64 << 20
"""The body of a metrics page or a query's answer. Compressed bodies and redirects are refused. The timeout of a command
covers the whole exchange, from connecting to the last byte."""
SERVICE_ANSWER_BYTES: Final = 512 << 20
"""The body of a kvscope service's answer to a command or to `kvscope.connect`: events of long windows are long."""
RECEIPT_BYTES: Final = 1 << 20
"""The body with which a receiver answers an alert."""
PAGE_ENGINES: Final = 64
"""Engines of one metrics page. More are left out, and the source reports how many."""
SOURCES: Final = 512
"""Sources that one service reads. Each has a thread."""
TARGET_LIST_BYTES: Final = 4 << 20
"""A list of targets that a discovery reads: a file, or one answer of a server."""
GONE_S: Final = 900
"""An engine known by metrics alone leaves the ledger when no source has had it for so many seconds."""
GONE_STREAM_S: Final = 86_400
"""The same for an engine known by its event stream."""

# ---------------------------------------------------------------- configuration files

CONFIGURATION_BYTES: Final = 1 << 20
"""A configuration file. A longer one is refused."""

# ---------------------------------------------------------------- requests to HTTP servers of kvscope

HEADER_BYTES: Final = 64 << 10
"""The request line and headers of a request. A longer header is answered with 431."""
HEADER_S: Final = 10.0
"""From the first byte of a request, or from connecting, to the end of its headers. Then the connection is closed."""
BODY_S: Final = 30.0
"""From there to the end of the body. Then the connection is closed."""
SERVICE_BODY_BYTES: Final = 1 << 20
"""The body of a request to `monitor serve`, or one message of a WebSocket. A longer body is answered with 413."""
SERVICE_CONNECTIONS: Final = 512
"""Connections to `monitor serve`, or three quarters of the process's file descriptors if that is less. One more takes
the place of the connection that has waited longest for its client."""
SERVICE_REQUESTS: Final = 256
"""Requests that `monitor serve` answers at once. Further ones are answered with 503, but `/healthz` as always."""
SERVICE_WEBSOCKETS: Final = 128
"""WebSockets of `monitor serve`, one for each browser. A further one is refused with 403."""
ENGINE_BODY_BYTES: Final = 16 << 20
"""The body of a request to the engine. A longer one is answered with 413."""
ENGINE_CONNECTIONS: Final = 16_384
"""Connections to the engine, or three quarters of the process's file descriptors if that is less."""
ENGINE_REQUESTS: Final = 8_192
"""Requests that the engine takes at once. Further ones are answered with 503, `/health` and `/metrics` as always."""
SESSIONS: Final = 256
"""Sessions of browsers. One more ends the oldest."""
SESSION_S: Final = 604_800
"""From opening a page with `?token=` to the end of the browser's session: seven days."""

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
BUS_ANSWER_BYTES: Final = 32 << 20
"""An agent's answer to a question of a hub, sent in parts. A longer one is refused: ask for a shorter window."""
BUS_AGENT_QUESTIONS: Final = 64
"""Questions that wait for one agent or are being answered, four at a time. It refuses further ones."""
HUB_QUESTIONS: Final = 128
"""Questions that one hub has sent to agents and that are not answered yet. Further ones are refused."""
HUB_ANSWERS_BYTES: Final = 256 << 20
"""Parts of answers that one hub holds at once. An answer that would exceed it is given up."""
