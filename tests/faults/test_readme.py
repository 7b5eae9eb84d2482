"""The table of faults names tests that exist, and has all 38 rows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE / "README.md").read_text(encoding="utf-8")


def test_every_row_is_there_and_shown() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\|$", TABLE, re.MULTILINE)
    assert rows == [str(number) for number in range(1, 39)]
    assert all("::test_" in row for row in re.findall(r"^\| \d+ \|.*$", TABLE, re.MULTILINE))


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE)
    assert len(named) > 60
    for file in {file for file, _ in named}:
        tree = ast.parse((HERE.parents[1] / file).read_text(encoding="utf-8"))
        there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not {name for where, name in named if where == file} - there, file
