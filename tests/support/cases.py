"""Which cases of a test run at every commit: a few that differ in kind. The others run with the slow tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

KINDS = ("fedavg", "feddra", "creamfl", "pms-fm", "scaffold")
"""Methods that differ in kind: a mean, two phases with weights of sites, representations, own models, own memory."""


def cases(values: Iterable[Any], often: Collection[Any] = KINDS, seconds: float = 2.0) -> list[Any]:
    """One parameter a value; all but those in ``often`` are slow. A tuple is one of ``often`` if its first value is.

    ``seconds``: how long a case takes, as pytest.mark.slow has it.
    """
    values = list(values)
    firsts = [value[0] if isinstance(value, tuple) else value for value in values]
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)),
                     marks=() if first in often else pytest.mark.slow(seconds=seconds))
        for value, first in zip(values, firsts, strict=True)
    ]  # fmt: skip
