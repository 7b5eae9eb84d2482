"""The numbers that the papers print, with the labels of their rows and columns: studies/tables, never corrected."""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

TABLES = Path(__file__).parents[1] / "tables"
NO_DOUBT = re.compile(r"|bold|.*\barrow\b.*|label printed twice.*|a site of.*")
"""Notes that say how a number is printed, and not that it may be wrong."""


class Printed(NamedTuple):
    """One number."""

    value: str
    spread: str  # standard deviation; "": none is printed
    doubt: str  # why it may be a misprint or misread; "": nothing speaks against it


@cache
def tables() -> dict[str, dict[tuple[str, str], Printed]]:
    """Table ("feddra:2") -> (label of the row, label of the column) -> number, in the order of the paper."""
    found: dict[str, dict[tuple[str, str], Printed]] = {}
    for path in sorted(TABLES.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                doubt = "" if NO_DOUBT.fullmatch(line["note"]) else line["note"].removeprefix("bold; ")
                place = label(line["row"]), label(line["column"])
                found.setdefault(line["table"], {})[place] = Printed(line["value"], line["spread"], doubt)
    return found


def label(text: str) -> str:
    """A label on one line: groups are joined by commas, as a bar would end a cell of a Markdown table."""
    return text.replace(" | ", ", ")


def labels(table: str) -> tuple[list[str], list[str]]:
    """The labels of the rows and of the columns, in the order of the paper."""
    places = tables()[table]
    return list(dict.fromkeys(row for row, _ in places)), list(dict.fromkeys(column for _, column in places))
