"""The table of faults has all 38 rows, and each has tests that exist (test_docs.py looks for them by name)."""

from __future__ import annotations

import re
from pathlib import Path

from support import evidence

TABLE = Path(__file__).with_name("README.md").read_text(encoding="utf-8")


def test_every_row_is_there_and_shown() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\|$", TABLE, re.MULTILINE)
    assert rows == [str(number) for number in range(1, 39)]
    shown = evidence.shown_by(evidence.FAULTS)
    assert list(shown) == [f"Row {row}" for row in rows]
    assert all(any(files.values()) for files in shown.values())
