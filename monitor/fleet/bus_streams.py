"""Makes the streams of a tenant, and changes their settings where they differ."""

from __future__ import annotations

from typing import Final

from nats.js import JetStreamContext, api
from nats.js.errors import NotFoundError

from ..base import limits
from .bus_subjects import events_stream, hubs_bucket, leases_bucket, points_stream, stream_of_bucket, subjects_of

DAY_S: Final = 86_400.0
EVENTS_AGE_S: Final = 90 * DAY_S
POINTS_AGE_S: Final = DAY_S
POINTS_KEPT: Final = 720
"""Points of one engine, an hour of them. The agent's own history has all of them."""
LEASES_AGE_S: Final = DAY_S
"""Only cleans up after agents that are gone for good: that a lease is over is decided by its missing renewals."""
DEFAULT_STREAM_BYTES: Final = 1 << 30
HUBS_AGE_S: Final = 90 * DAY_S
"""As long as findings: an engine that is heard again by then has the owner that it had."""
BUCKET_BYTES: Final = 64 << 20


def stream_configs(tenant: str, replicas: int, most_bytes: int = DEFAULT_STREAM_BYTES) -> list[api.StreamConfig]:
    """Return the settings of a tenant's streams. `most_bytes` bounds transitions and points each.

    A full stream of transitions refuses further ones, so that none goes unnoticed: agents keep them and report that it
    is full. A full stream of points drops the oldest.
    """
    return [
        api.StreamConfig(
            name=events_stream(tenant),
            subjects=subjects_of(tenant, "finding", "annotation"),
            max_age=EVENTS_AGE_S,
            max_bytes=most_bytes,
            max_msg_size=limits.BUS_PAYLOAD_BYTES + 4_096,  # and headers
            discard=api.DiscardPolicy.NEW,
            num_replicas=replicas,
            allow_direct=True,
        ),
        api.StreamConfig(
            name=points_stream(tenant),
            subjects=subjects_of(tenant, "point"),
            max_age=POINTS_AGE_S,
            max_bytes=most_bytes,
            max_msgs_per_subject=POINTS_KEPT,
            max_msg_size=limits.BUS_PAYLOAD_BYTES + 4_096,
            discard=api.DiscardPolicy.OLD,
            num_replicas=replicas,
            allow_direct=True,
        ),
        _bucket_config(leases_bucket(tenant), replicas, LEASES_AGE_S),
        _bucket_config(hubs_bucket(tenant), replicas, HUBS_AGE_S),
    ]


def _bucket_config(bucket: str, replicas: int, most_age_s: float) -> api.StreamConfig:
    """Return the settings of a bucket. It takes no header that removes messages: whoever may write one key could empty
    it with that.
    """
    return api.StreamConfig(
        name=stream_of_bucket(bucket),
        subjects=[f"$KV.{bucket}.>"],
        max_age=most_age_s,
        max_bytes=BUCKET_BYTES,
        max_msgs_per_subject=1,
        discard=api.DiscardPolicy.NEW,
        num_replicas=replicas,
        allow_direct=True,
        allow_rollup_hdrs=False,
        deny_delete=True,
    )


async def make_streams(
    stream_api: JetStreamContext, tenant: str, replicas: int, most_bytes: int = DEFAULT_STREAM_BYTES
) -> list[str]:
    """Make or update a tenant's streams. Return a line for each change. Raises nats.errors.Error."""
    done = []
    for config in stream_configs(tenant, replicas, most_bytes):
        assert config.name is not None
        try:
            await stream_api.stream_info(config.name)
        except NotFoundError:
            await stream_api.add_stream(config)
            done.append(f"{config.name}: created with {replicas} replicas")
        else:
            await stream_api.update_stream(config)
            done.append(f"{config.name}: updated to {replicas} replicas")
    return done
