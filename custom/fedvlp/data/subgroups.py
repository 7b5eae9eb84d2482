"""Subgroups of people by which a model is judged: sex, age, view, or what a table's columns say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

AGE = "age"
"""The subgroup whose values are cut into bands."""

VIEW = "view"
"""The subgroup of how a film was taken: AP, PA, lateral."""

BAND, OLDEST = 20, 80
"""Years of a band, and where the last one begins (Seyyed-Kalantari et al., 2021, doi:10.1038/s41591-021-01595-0)."""

_YEARS = re.compile(r"(\d+(?:\.\d+)?)\s*([YMWD]?)", re.IGNORECASE)
_HIGHEST = 120  # published tables have ages of 414


def age_band(text: str) -> str:
    """ "40-59" for "47", "047Y" or "47.5"; "0-19" for months, weeks and days; "" for what is no age of a person."""
    given = _YEARS.fullmatch(text.strip())
    if given is None:
        return ""
    years = float(given[1]) if given[2].upper() in ("", "Y") else 0.0
    if years > _HIGHEST:
        return ""
    first = int(min(years, OLDEST)) // BAND * BAND
    return f"{OLDEST}+" if first == OLDEST else f"{first}-{first + BAND - 1}"


def table_of(columns: Mapping[str, Sequence[str]]) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Values [N, G] str of G named ``columns`` [N] each, ages as bands, "" where nothing is said; and their names.

    None without a column.
    """
    values = [list(map(age_band if name.lower() == AGE else str.strip, column)) for name, column in columns.items()]
    return np.array(values, dtype=np.str_).T if values else None, tuple(columns)
