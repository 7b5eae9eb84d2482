"""docs/feddra.md is complete and true: every line of the algorithm has code, tests that exist, and a setting."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support import feddra_page
from support.feddra_page import PAGE, STEPS, Step, found, keys, marked, page

from fedvlp.methods import FedDRA
from fedvlp.run import presets
from fedvlp.run.config import override

TESTS = Path(__file__).parent / "methods"
KEYS = [step.key for step in STEPS]


def test_the_page_is_of_this_code() -> None:
    """``make docs`` writes it anew."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_line_and_equation_of_the_docstring_is_a_step() -> None:
    docstring = FedDRA.__doc__ or ""
    lines = re.findall(r"^ *(\d+)\. ", docstring, re.MULTILINE)
    assert lines == [str(number) for number in range(1, len(lines) + 1)]
    assert len(lines) >= 6
    assert {key.rstrip("abc") for key in KEYS if key.startswith("line")} == {f"line {number}" for number in lines}
    assert {key for key in KEYS if key.startswith("eq")} == {
        f"eq. {n}" for n in re.findall(r"\(eq\. (\d+)\)", docstring)
    }


def test_every_step_has_code_and_every_mark_in_the_code_is_a_step() -> None:
    assert found().keys() == set(KEYS)


def test_a_step_without_code_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feddra_page, "STEPS", (*STEPS, Step("eq. 9", "", "", (), "", "")))
    with pytest.raises(KeyError, match=r"eq\. 9"):
        page()


def test_the_tests_of_a_step_exist() -> None:
    for step in STEPS:
        assert step.tests
        for test in step.tests:
            file, _, name = test.partition("::")
            tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_the_setting_of_a_step_changes_the_method() -> None:
    """It is a setting of the preset, takes this value, and does not have it anyway."""
    for step in STEPS:
        key, _, value = step.off.partition("=")
        preset = presets.get("feddra")
        assert override(preset, key, value).method != preset.method


def test_what_counts_as_a_mark() -> None:
    assert keys("# lines 2 and 4: E1 and E2") == ["line 2", "line 4"]
    assert keys("# line 6b") == ["line 6b"]
    assert keys("# eq. 1: [B, d]") == ["eq. 1"]
    assert [keys(comment) for comment in ("# as in line 2", "# eq. 1 of both papers", "# line two")] == [[], [], []]


def test_the_whole_statement_is_shown_with_its_function() -> None:
    source = """
class A:
    mu: float = 1.0  # line 3

    def f(self, x):
        if x:  # not marked
            return g(  # eq. 2
                x,  # of the batch
                2,
            )
"""
    assert list(marked(source)) == [("line 3", "A", "mu: float = 1.0"), ("eq. 2", "A.f", "return g(x, 2,)")]
