"""Who the patients of a data set are, for counting those whom two sites share; no name ever leaves a site."""

from __future__ import annotations

import hashlib
import hmac
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

_MANGLED = re.compile(
    r"[+-]?\d(?:[.,]\d*)?e\+\d+|#(?:N/?A|REF!|VALUE!|NAME\?|NUM!|DIV/0!|NULL!)|#{3,}", re.ASCII | re.IGNORECASE
)
_AS_DECIMAL = re.compile(r"(\d+)[.,]0+", re.ASCII)


def patient_names(source: Any, site: str | None = None, column: str = "") -> list[str]:
    """The patients of a source as its table writes them, "" where it has none; no image is read.

    ``site``: those of one site alone, where the source deals its records to several. ``column``: of the table, in the
    place of the source's own. Raises ValueError where the source cannot tell.
    """
    if hasattr(source, "patient_names"):
        names: list[str] = source.patient_names(site, column)
        return names
    if column:
        raise ValueError(f"{type(source).__name__} has no columns to choose from; leave overlap.column out")
    cohort = source.build()
    if site is None:
        return list(cohort.patients)
    if cohort.sites is None:
        raise ValueError(f"{type(source).__name__} does not say which site a patient belongs to")
    return [name for name, own in zip(cohort.patients, cohort.sites, strict=True) if own == site]


def normalised(name: str) -> str:
    """A name as two tables should agree on it: Unicode NFKC, no case, no space around it and one at most within."""
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def mangled(names: Sequence[str]) -> int:
    """How many of the N ``names`` a spreadsheet has put something in the place of, that others of them have as well.

    It shortens a long number to 1.23457E+11, shows one that is wider than its column as ####, or an error as #N/A.
    """
    counts = Counter(name.strip().casefold() for name in names if _MANGLED.fullmatch(name.strip()))
    return sum(count for count in counts.values() if count > 1)


def one_number(names: Sequence[str]) -> list[str]:
    """The N ``names`` with "100.0" as "100" where some are "100": a column with a gap becomes one of decimals."""
    known = {name.strip() for name in names}

    def whole(name: str) -> str:
        match = _AS_DECIMAL.fullmatch(name.strip())
        return match[1] if match and match[1] in known else name

    return [whole(name) for name in names]


def keyed(names: Iterable[str], key: bytes) -> list[str]:
    """HMAC-SHA256 of each distinct patient in hex, sorted; names that are empty are nobody's."""
    patients = {normalised(name) for name in names} - {""}
    return sorted(hmac.new(key, b"patient\0" + name.encode(), hashlib.sha256).hexdigest() for name in patients)
