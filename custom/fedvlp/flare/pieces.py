"""How the pieces of a large tensor are called on FLARE's wire. Plain Python: a process without torch reads them too."""

from __future__ import annotations

from collections.abc import Iterable

from nvflare.fuel.utils.app_config_utils import get_positive_int_var

PIECE = 8 << 20
"""Most bytes of a piece, where the job does not say."""

SETTING = "fedvlp_piece_bytes"
"""Where a job's configuration says it, at the top level of either side (flare/timeouts.py)."""


def most_bytes() -> int:
    """Most bytes of a piece that this process sends."""
    of_job: int | None = get_positive_int_var(SETTING, None)  # None: FLARE would remember any other default
    return of_job or PIECE


def name_of_piece(name: str, index: int, shape: Iterable[int]) -> str:
    """The name of piece ``index`` of the tensor ``name``."""
    return f"{name}|{index}|{'x'.join(map(str, shape))}"


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of pieces by the tensor they belong to, in order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("|")[0], []).append(name)
    return {
        key: sorted(group, key=lambda name: int(name.split("|")[1]) if "|" in name else 0)
        for key, group in groups.items()
    }


def shape_of(name: str) -> list[int] | None:
    """The shape of the tensor that a piece belongs to; None for a whole tensor."""
    fields = name.split("|")
    return [int(length) for length in fields[2].split("x")] if len(fields) == 3 else None
