"""Numbers of patients and studies as a table writes them: one patient is one however spelled."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

_MANGLED = re.compile(
    r"[+-]?\d(?:[.,]\d*)?e\+\d+|#(?:N/?A|REF!|VALUE!|NAME\?|NUM!|DIV/0!|NULL!)|#{3,}", re.ASCII | re.IGNORECASE
)
_AS_DECIMAL = re.compile(r"(\d+)[.,]0+", re.ASCII)


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
