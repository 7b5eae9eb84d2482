"""Numbers of patients and studies as a table writes them: one patient is one however spelled."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

_MANGLED = re.compile(
    r"[+-]?\d(?:[.,]\d*)?e\+\d+|#(?:N/?A|REF!|VALUE!|NAME\?|NUM!|DIV/0!|NULL!)|#{3,}", re.ASCII | re.IGNORECASE
)
_AS_DECIMAL = re.compile(r"0*(\d+?)(?:[.,]0+)?", re.ASCII)
_AS_TEXT = re.compile(r"'(\d+)|=\"(.*)\"", re.ASCII)  # how a spreadsheet is told that a number is a text


def normalised(name: str) -> str:
    """A name as two tables should agree on it: Unicode NFKC, no case, no space around it and one at most within."""
    if told := _AS_TEXT.fullmatch(name.strip()):
        name = told[1] or told[2]
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def mangled(names: Sequence[str]) -> int:
    """How many of the N ``names`` a spreadsheet has put something in the place of, that others of them have as well.

    It shortens a long number to 1.23457E+11, shows one that is wider than its column as ####, or an error as #N/A.
    """
    counts = Counter(name.strip().casefold() for name in names if _MANGLED.fullmatch(name.strip()))
    return sum(count for count in counts.values() if count > 1)


def one_number(names: Sequence[str]) -> list[str]:
    """The N ``names`` with "100.0" and "00100" as "100" where some are "100".

    A column with a gap becomes one of decimals, and a spreadsheet takes the zeros before a number away.
    """
    names = [normalised(name) for name in names]
    known = set(names)

    def whole(name: str) -> str:
        match = _AS_DECIMAL.fullmatch(name)
        return match[1] if match and match[1] in known else name

    return [whole(name) for name in names]
