"""Seeds named by what they are for, so that nothing depends on global state or on the order in which sites run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def seed(*names: object) -> int:
    """A seed in [0, 2^63) from e.g. ``(run seed, site, round, phase index)``; the same in every process and version."""
    digest = hashlib.blake2b("\x1f".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seeded(run: int, module: int, build: Callable[[], M]) -> M:
    """Builds a module with a CPU generator of its own: unaffected by the global generators and by the other modules.

    Parts 0 to 5 are those of the dual encoder, 6 what is added to it, 7 the objective. There are no more than 8: part 8
    would be part 0 of the next run's seed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed((run * 8 + module) % 2**63)
        return build()
