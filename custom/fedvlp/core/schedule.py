"""How fast and how long sites train in the rounds of a run."""

from __future__ import annotations

import math


def cosine(round: int, rounds: int) -> float:
    """The factor of the learning rate: from 1 in round 0 to 0 in round ``rounds`` and after; 0 rounds: always 1.

    Loshchilov and Hutter, 2017, https://arxiv.org/abs/1608.03983, eq. 5, without restarts.
    """
    return (1 + math.cos(math.pi * min(1.0, round / rounds))) / 2 if rounds else 1.0


def one_pass(records: int, size: int) -> int:
    """Steps of one pass over the records, without the smaller last batch."""
    return max(1, records // size)
