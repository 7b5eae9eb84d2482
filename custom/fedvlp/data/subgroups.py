"""Subgroups of people by which a model is judged: sex, age, view, or what a table's columns say."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

import numpy as np

AGE = "age"
"""The subgroup whose values are cut into bands."""

VIEW = "view"
"""The subgroup of how an image was taken: AP, PA, frontal, lateral."""

SEX = "sex"
"""The subgroup whose values are F, M, and what a table says else."""

_UNKNOWN = dict.fromkeys(("unknown", "unbekannt", "inconnu", "desconocido", "na", "u"), "")
SEXES = _UNKNOWN | {
    word: sex
    for sex, words in {
        "F": "f female woman w weiblich frau femme feminin feminine mujer femenino femenina donna femmina femminile "
        "femea feminino feminina vrouw vrouwelijk",
        "M": "m male man maennlich mannlich mann h homme masculin hombre masculino uomo maschio maschile macho "
        "mannelijk",
    }.items()
    for word in words.split()
}
VIEWS = _UNKNOWN | {
    word: view
    for view, words in {
        "AP": "ap anteroposterior antpost aphorizontal apliegend apsupine aperect apportable apsemierect apsitzend",
        "PA": "pa posteroanterior postant pastehend paerect pastanding",
        "lateral": "lateral lat ll rl l r leftlateral rightlateral seitlich lateralis profil profile",
        "frontal": "frontal face",
        "ribs": "costal ribs rippen",
    }.items()
    for word in words.split()
}
"""Folded (``_folded``): what collections and tables write -> what it is called here, so that several sites' meet."""

BAND, OLDEST = 20, 80
"""Years of a band, and where the last one begins (Seyyed-Kalantari et al., 2021, doi:10.1038/s41591-021-01595-0)."""

_YEARS = re.compile(r"([>\u2265]?) ?(\d+(?:[.,]\d+)?) ?(\+?)[ -]*([a-z/ ]*)", re.IGNORECASE)
_UNITS = {
    1.0: ("", "y", "yr", "yrs", "year", "years", "yo", "y/o", "years old", "year old", "j", "jahr", "jahre", "an",
          "ans", "a", "ano", "anos", "anno", "anni", "jaar"),
    0.0: (
        "m", "mo", "month", "months", "monat", "monate", "w", "week", "weeks", "woche", "wochen", "d", "day", "days",
        "t", "tag", "tage", "mois", "mes", "meses", "mese", "mesi", "jour", "jours", "dia", "dias", "giorno", "giorni",
    ),
}  # fmt: skip
"""What one of a unit counts in years: months, weeks and days are those of small children."""
_HIGHEST = 120  # published tables have ages of 414


def age_band(text: str) -> str:
    """ "40-59" for "47", "047Y", "47.5" or "47 years"; "0-19" for months, weeks and days; "80+" for "90+" or ">89".

    "" for what is no age of a person, or a bound that leaves the band open.
    """
    plain = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    given = _YEARS.fullmatch(" ".join(plain.split()))
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


def _folded(text: str) -> str:
    """A word in small letters, without accents, signs and spaces: "P. A." is "pa", "M\u00e4nnlich" is "mannlich"."""
    letters = unicodedata.normalize("NFKD", text.casefold())
    return "".join(letter for letter in letters if letter.isalnum())


def _sex(text: str) -> str:
    return SEXES.get(_folded(text), text.strip())


def view_of(text: str) -> str:
    """AP, PA, lateral or frontal, whatever a collection calls it; another word as it is, "" where nothing is said."""
    return VIEWS.get(_folded(text), text.strip())


READ = {AGE: age_band, SEX: _sex, VIEW: view_of}
"""Subgroup -> what is made of its values."""


def table_of(columns: Mapping[str, Sequence[str]]) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Values [N, G] str of G named ``columns`` [N] each, "" where nothing is said; and their names.

    Ages are bands, and sexes and views are called alike in all tables. None without a column.
    """
    values = [list(map(READ.get(name.lower(), str.strip), column)) for name, column in columns.items()]
    return np.array(values, dtype=np.str_).T if values else None, tuple(columns)
