"""What the parts of the red team share: the attacker's text, and what is said when a party is hurt."""

from __future__ import annotations

from random import Random
from typing import Any

WORDS = "Jane Doe\n[E:1]\x1b[31m<script>"
"""The attacker's text: it could be a patient's, forge a line of a log, or be a program on a page."""

LONGEST = 2500  # characters of an answer


class Breach(AssertionError):  # noqa: N818
    """A hostile party got further than it may; the message says with what."""


def refuse_words(attack: str, said: str) -> None:
    """Raises Breach where an answer repeats the attacker's text, breaks the line or is endless."""
    repeats = "Jane" in said or "<script" in said
    if repeats or not said.isprintable() or len(said) > LONGEST:
        raise Breach(f"{attack}: the answer repeats what it was sent: {said[:300]!r}")
    if not said:
        raise Breach(f"{attack}: refused without a word")


def shown(value: Any) -> str:
    """A value for the name of an attack."""
    try:
        return repr(value)[:100]
    except ValueError:
        return "a number of thousands of digits"


def any_number(random: Random) -> Any:
    """A number at an extreme, or what only looks like one."""
    extremes = (
        -1, 0, 1, 2**31, 2**53, 2**63, 10**30, 10**5000, -(10**400), 1e12, -1e300, 3e38, 5e-324, float("nan"),
        float("inf"), float("-inf"), True, 1 + 2j, "7", b"7",
    )  # fmt: skip
    return random.choice(extremes)


def anything(random: Random, depth: int = 0) -> Any:
    """A value of any type that FLARE brings, containers included."""
    import numpy as np
    import torch

    plain = (
        None, WORDS, WORDS.encode(), "", "\ud800", any_number(random), torch.ones(2), torch.tensor(float("nan")),
        torch.zeros(0), np.ones(2), np.array(["train", WORDS]), np.float64(1.0), np.int64(3), torch.tensor(1),
    )  # fmt: skip
    if depth > 2 or random.random() < 0.7:
        return random.choice(plain)
    inner = [anything(random, depth + 1) for _ in range(random.randrange(4))]
    return random.choice((inner, tuple(inner), {str(i): value for i, value in enumerate(inner)}, {WORDS: inner}))
