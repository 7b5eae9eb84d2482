"""Seeds named by what they are for, so that nothing depends on global state or on the order in which sites run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def seed(*names: object) -> int:
    """A seed in [0, 2^63) from e.g. ``(run seed, site, round, phase index)``; the same in every process and version."""
    digest = hashlib.blake2b("\x1f".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def set_global(number: int) -> None:
    """Sets the global generators: of the CPU, and of an accelerator where there is one.

    torch.manual_seed asks every kind of device. One that this machine lacks keeps the text of the caller's stack, for
    the day on which it is there: a millisecond and some kilobytes for each call.
    """
    if _accelerator():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


@cache
def _accelerator() -> bool:
    newer = getattr(torch, "accelerator", None)  # torch 2.6 and later
    return newer.is_available() if newer else torch.cuda.is_available() or torch.backends.mps.is_available()


def seeded(run: int, module: int, build: Callable[[], M]) -> M:
    """Builds a module with a CPU generator of its own: unaffected by the global generators and by the other modules.

    Parts 0 to 5 are those of the dual encoder, 6 what is added to it, 7 the objective. There are no more than 8: part 8
    would be part 0 of the next run's seed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed((run * 8 + module) % 2**63)
        return build()
