"""Seeds named by what they are for, so that nothing depends on global state or on the order in which sites run."""

from __future__ import annotations

import hashlib


def seed(*parts: object) -> int:
    """A seed in [0, 2^63) from e.g. ``(run seed, site, round, phase index)``; the same in every process and version."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
