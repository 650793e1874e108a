"""The chain of hashes by which equal prefixes are found.

A full block's digest covers its tokens and its predecessor's digest, so equal digests mean equal prefixes. Digests are
keyed: the 64 bits of each that leave the process reveal nothing about the text without the key.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16
PUBLIC_BYTES = 8


class PrefixHasher:
    """Hashes blocks of `block_size` tokens under `key` (at most 64 bytes, random if empty)."""

    def __init__(self, block_size: int, key: bytes = b"") -> None:
        self.block_size = block_size
        self._key = key or os.urandom(32)

    def extend(self, digests: list[bytes], token_ids: Sequence[int]) -> None:
        """Append to `digests` those of the full blocks of `token_ids` that it does not have yet."""
        size = self.block_size
        parent = digests[-1] if digests else b""
        for start in range(len(digests) * size, len(token_ids) - size + 1, size):
            tokens = array("q", token_ids[start : start + size]).tobytes()
            parent = blake2b(parent + tokens, digest_size=DIGEST_BYTES, key=self._key).digest()
            digests.append(parent)


def in_group(digest: bytes, group: int) -> bytes:
    """Return the key of the same prefix in a KV group's blocks: the digest itself, or for another than the first group
    with a byte more.
    """
    return digest + bytes((group,)) if group else digest


def kv_group_of(digest: bytes) -> int:
    """Return the KV group of a result of `in_group`."""
    return digest[DIGEST_BYTES] if len(digest) > DIGEST_BYTES else 0


def public_hashes(digests: Sequence[bytes]) -> list[int]:
    """Return the 64 bits of each digest that events carry, never 0. Different groups have different ones."""
    ends = b"".join([digest[-PUBLIC_BYTES:] for digest in digests])
    return [value or 1 for value in struct.unpack(f"<{len(digests)}q", ends)]
