"""What leaves a site of an error: a sentence written for the server, with numbers and hashes in it, or nothing."""

from __future__ import annotations

import ast
import pickle
import string
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fedvlp
from fedvlp.core.site_error import IN_THE_LOG, UNTOLD, SiteError, one_line
from fedvlp.federation.site import failure
from fedvlp.flare import messages
from fedvlp.run.plugins import PluginError

SECRETS = (
    "/srv/hospital/DOE^JANE/scan.dcm", "C:\\films\\Doe.dcm", "pretrain-oncology", "Befund_Spalte", "Jane Doe, 1984",
    "effusion on the left", "Jane\nDoe", "<script>x</script>", "7' or 1", "site-9: MRN 0012345", "{number}", "x" * 5000,
)  # fmt: skip
"""What no sentence that leaves may hold: paths, names of data sets and columns, patients' words."""


class RefusalError(SiteError, ValueError):
    """An error of this test."""


def sent(error: Exception) -> str:
    """What the server is told of an error that ended a site's task."""
    said = messages.failure(messages.send_failure(failure(error)))
    assert said is not None
    return said.text


@pytest.mark.parametrize("secret", SECRETS)
def test_no_other_text_leaves(secret: str) -> None:
    """Neither in the words of an error, nor in the place of a number of a public sentence."""
    for error in (ValueError, FileNotFoundError, FloatingPointError, KeyError, PluginError):
        assert sent(error(secret)) == UNTOLD
    assert sent(RefusalError(secret)) == f"RefusalError: {IN_THE_LOG}"
    assert sent(RefusalError(secret, public="the site is small")) == "RefusalError: the site is small"
    assert sent(RefusalError(public="it has {rows} rows", rows=secret)) == f"RefusalError: {IN_THE_LOG}"


def test_a_public_sentence_leaves_with_its_numbers_and_the_log_has_the_rest() -> None:
    refusal = RefusalError("row 7 of pairs.csv", public="{rows} of {share:.1%}, {mark}", rows=7, share=0.5, mark="0a1f")
    assert str(refusal) == "row 7 of pairs.csv"
    assert sent(refusal) == "RefusalError: 7 of 50.0%, 0a1f"
    assert str(RefusalError(public="{rows} rows", rows=7)) == "7 rows"
    assert pickle.loads(pickle.dumps(refusal)).public == refusal.public, "it may come out of a worker process"


def test_of_memory_that_is_too_small_the_server_is_told_what_helps() -> None:
    assert sent(MemoryError("Jane Doe")) == "MemoryError: this site's memory is too small; lower training.batch_size"


def test_what_comes_from_another_process_is_one_plain_line_or_is_not_repeated() -> None:
    for text in [*SECRETS[6:8], SECRETS[-1], "", None, 7, ["x"], "a\x1b[31m", "\ud800"]:
        assert one_line(text) == UNTOLD


@cache
def trees() -> list[ast.Module]:
    """The package's files; not at import, as every worker collects this one."""
    return [ast.parse(file.read_text(encoding="utf-8")) for file in Path(fedvlp.__file__).parent.rglob("*.py")]


def errors() -> set[str]:
    """The names of SiteError and of the package's classes below it."""
    classes = [node for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    known = {"SiteError"}
    while more := {node.name for node in classes if known & set(map(ast.unparse, node.bases))} - known:
        known |= more
    return known


def public_words() -> Iterator[ast.expr]:
    """What the package gives its errors as public words: where they are raised, and for all errors of a class."""
    known = errors()
    for node in (node for tree in trees() for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in known:
            yield from (keyword.value for keyword in node.keywords if keyword.arg in ("public", None))
        if isinstance(node, ast.ClassDef) and node.name in known:
            lines = [line for line in node.body if isinstance(line, ast.Assign)]
            yield from (line.value for line in lines if ast.unparse(line.targets[0]) == "told")


def literals(value: ast.expr) -> list[str]:
    """The texts that an expression may be. Raises AssertionError for one that is put together."""
    if isinstance(value, ast.IfExp):
        return literals(value.body) + literals(value.orelse)
    assert isinstance(value, ast.Constant), ast.unparse(value)
    assert isinstance(value.value, str)
    return [value.value]


def test_public_words_are_literals_so_that_nothing_can_be_put_into_them() -> None:
    """An f-string, a variable or a call could hold a path."""
    words = [text for value in public_words() for text in literals(value)]
    assert len(words) > 80
    for text in words:
        fields = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
        assert all(name.isidentifier() for name in fields), text
        plain = "".join(before for before, *_ in string.Formatter().parse(text))
        assert one_line(f"PrivacyError: {plain}") != UNTOLD, text
