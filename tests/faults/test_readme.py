"""The table of faults names tests that exist, and has all 38 rows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE / "README.md").read_text(encoding="utf-8")


NAMED = re.compile(r"`((?:tests/)?[\w/]+\.py)(?:::(\w+))?`|`(test_\w+)`")
"""A file below tests/, alone or with a test; a test of the file before it."""


def test_every_row_is_there_and_shown() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\|$", TABLE, re.MULTILINE)
    assert rows == [str(number) for number in range(1, 39)]
    assert all("`test_" in row for row in re.findall(r"^\| \d+ \|.*$", TABLE, re.MULTILINE))


def test_every_test_that_is_named_exists() -> None:
    file, named = "", []
    for found in NAMED.finditer(TABLE.partition("| # |")[2]):
        file = (found[1] or file).removeprefix("tests/")
        named += [(file, name) for name in found.group(2, 3) if name]
    assert len(named) > 100
    for file, name in named:
        tree = ast.parse((HERE.parent / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file} has no {name}"
