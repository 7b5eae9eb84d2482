"""Subgroups of people by which a model is judged: sex, age, view, or what a table's columns say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

AGE = "age"
"""The subgroup whose values are cut into bands."""

VIEW = "view"
"""The subgroup of how an image was taken: AP, PA, frontal, lateral."""

SEX = "sex"
"""The subgroup whose values are F, M, and what a table says else."""

SEXES = {
    "F": "F", "FEMALE": "F", "WOMAN": "F", "W": "F", "WEIBLICH": "F", "M": "M", "MALE": "M", "MAN": "M",
    "M\u00c4NNLICH": "M", "U": "", "UNKNOWN": "", "N/A": "",
}  # fmt: skip
VIEWS = {
    "AP": "AP", "PA": "PA", "LATERAL": "lateral", "LAT": "lateral", "LL": "lateral", "RL": "lateral",
    "FRONTAL": "frontal", "UNKNOWN": "", "N/A": "",
}  # fmt: skip
"""In capitals: what collections and tables write, and what it is called here, so that those of several sites meet."""

BAND, OLDEST = 20, 80
"""Years of a band, and where the last one begins (Seyyed-Kalantari et al., 2021, doi:10.1038/s41591-021-01595-0)."""

_YEARS = re.compile(r"([>\u2265]?) ?(\d+(?:[.,]\d+)?) ?(\+?)[ -]*([a-z/ ]*)", re.IGNORECASE)
_UNITS = {
    1.0: ("", "y", "yr", "yrs", "year", "years", "yo", "y/o", "years old", "year old", "j", "jahr", "jahre"),
    0.0: (
        "m", "mo", "month", "months", "monat", "monate", "w", "week", "weeks", "woche", "wochen", "d", "day", "days",
        "t", "tag", "tage",
    ),
}  # fmt: skip
"""What one of a unit counts in years: months, weeks and days are those of small children."""
_HIGHEST = 120  # published tables have ages of 414


def age_band(text: str) -> str:
    """ "40-59" for "47", "047Y", "47.5" or "47 years"; "0-19" for months, weeks and days; "80+" for "90+" or ">89".

    "" for what is no age of a person, or a bound that leaves the band open.
    """
    given = _YEARS.fullmatch(" ".join(text.split()))
    unit = next((years for years, names in _UNITS.items() if given and given[4].strip().lower() in names), None)
    if given is None or unit is None:
        return ""
    years = unit * float(given[2].replace(",", "."))
    if years > _HIGHEST:
        return ""
    if given[1] or given[3]:  # "90+", or "above 89"
        return f"{OLDEST}+" if years >= OLDEST - (given[1] == ">") else ""
    first = int(min(years, OLDEST)) // BAND * BAND
    return f"{OLDEST}+" if first == OLDEST else f"{first}-{first + BAND - 1}"


def _sex(text: str) -> str:
    return SEXES.get(text.strip().upper(), text.strip())


def view_of(text: str) -> str:
    """AP, PA, lateral or frontal, whatever a collection calls it; another word as it is, "" where nothing is said."""
    return VIEWS.get(text.strip().upper(), text.strip())


READ = {AGE: age_band, SEX: _sex, VIEW: view_of}
"""Subgroup -> what is made of its values."""


def table_of(columns: Mapping[str, Sequence[str]]) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Values [N, G] str of G named ``columns`` [N] each, "" where nothing is said; and their names.

    Ages are bands, and sexes and views are called alike in all tables. None without a column.
    """
    values = [list(map(READ.get(name.lower(), str.strip), column)) for name, column in columns.items()]
    return np.array(values, dtype=np.str_).T if values else None, tuple(columns)
