"""What a reader needs and no linter checks: documentation of all that is public, the field's words in names, prose."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fedvlp

PACKAGE = Path(fedvlp.__file__).parent


@cache
def trees() -> dict[str, ast.Module]:
    """The package's files, parsed by the first test that asks."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Documented]]:
    """Every public class, function and method below a node, with its dotted name; nothing within functions."""
    for node in tree.body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{prefix}{node.name}.")


FLARE_HOOKS = {
    "start_controller", "stop_controller", "control_flow", "process_result_of_unknown_task", "handle_event", "execute",
    "process", "to_downloadable", "download", "make_lazy_ref", "supported_type", "get_download_dot", "native_decompose",
    "native_recompose", "get_item_count", "produce_item", "get_item_size", "consume_items",
}  # fmt: skip
"""Methods that NVIDIA FLARE's classes document and call."""

PROTOCOLS = {"append"}
"""Methods of ``list``."""


def undocumented(trees: dict[str, ast.Module]) -> list[str]:
    """What lacks a docstring: modules, classes, functions, and methods.

    A method may do without where a method of its name is documented elsewhere in the package or in FLARE: it overrides
    a hook, and what is particular about it is in the docstring of its class.
    """
    hooks = {
        name.rpartition(".")[2]
        for tree in trees.values()
        for name, node in public(tree)
        if "." in name and ast.get_docstring(node)
    }
    hooks |= FLARE_HOOKS | PROTOCOLS
    lacking = [path for path, tree in trees.items() if not ast.get_docstring(tree)]
    for path, tree in trees.items():
        for name, node in public(tree):
            overrides = "." in name and name.rpartition(".")[2] in hooks
            if not ast.get_docstring(node) and not overrides:
                lacking.append(f"{path}: {name}")
    return lacking


BANNED = {"place", "places", "keep", "kept", "host", "found", "part", "parts", "mend", "door", "lot"}
"""Words that named too many things. Use a noun: index, row, position; stored; trainer; result; chunk; fix."""

PUBLIC_NAMES = {"deploy/machine.py": {"found"}}
"""Names that others use, and that therefore stay: a field of a check."""


def bound(tree: ast.AST) -> Iterator[str]:
    """Every name that a module gives: variables, parameters, attributes, functions, classes, imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, Documented):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def test_everything_public_is_documented() -> None:
    assert set(undocumented(trees())) <= {"run/folder.py: RunFolder.checkpoint"}


def test_the_test_above_sees_what_is_missing() -> None:
    source = (
        '"""A module."""\nclass A:\n    """A."""\n    def hook(self):\n        """One."""\n    def bare(self): ...\n'
    )
    other = "class B:\n    def hook(self): ...\n    def _own(self): ...\ndef f():\n    def inner(): ...\n"
    assert undocumented({"a.py": ast.parse(source), "b.py": ast.parse(other)}) == [
        "b.py", "a.py: A.bare", "b.py: B", "b.py: f",
    ]  # fmt: skip


def test_names_are_the_fields() -> None:
    offences = {path: (set(bound(tree)) & BANNED) - PUBLIC_NAMES.get(path, set()) for path, tree in trees().items()}
    assert {path: words for path, words in offences.items() if words} == {}


def test_every_exception_is_needed() -> None:
    for path, words in PUBLIC_NAMES.items():
        assert words <= set(bound(trees()[path])), path


def test_the_test_of_names_sees_every_kind() -> None:
    source = "import door\ndef keep(part): lot = 1\nclass mend: found: int = 0\na.host = 1\nfor place in x: ...\n"
    assert set(bound(ast.parse(source))) >= {"door", "keep", "part", "lot", "mend", "found", "host", "place"}


# Prose

PROSE = {
    r"films?": "X-ray, image",
    r"less (?:Fed\w+|mFed\w+|itself|the (?:same|mean|server|public))": "minus",
    r"told (?:apart|from)|can(?:not)? be told|tells? \w+ apart": "significant, distinguished, detected",
    r"unlike (?:sites|hospitals|scanners)|hospitals unlike": "heterogeneous, non-IID, that differ",
    r"dealt": "partitioned",
    r"by heart": "memorised",
    r"lent": "imputed",
    r"(?:has|have|had) the (?:same )?bytes": "is bit-identical",
    r"(?:go|goes|going|went) on": "resumes, continues",
    r"turn(?:s|ed) (?:\w+ changes )?round": "sign-flipped",
    r"steps in all": "total steps",
    r"built-in cohort|drawn (?:films|images|cohort)": "synthetic cohort",
    r"(?<!standard )deviation": "SD",
    r"coin": "chance",
    r"rooms?(?! for)": "packages",
    r"house": "architecture",
    r"gate for reports": "PHI scan",
    r"head start": "leads only early in training",
}
"""Words that only this project knew, in Markdown, and the field's own. `code` may have them: names stay."""

ROOT = PACKAGE.parents[1]


def pages() -> list[Path]:
    """The Markdown of the repository."""
    folders = ("custom", "docs", "poc", "provisioning", "studies", "tests")
    found = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))]
    return sorted(found)


def own_words(text: str) -> dict[str, str]:
    """The words of ``text`` that have a better one, each with it; code, links and what is quoted are left out."""
    plain = re.sub(r"```.*?```|``[^`]*``|`[^`]*`|\]\([^)]*\)|\"[^\"\n]*\"", " ", text, flags=re.DOTALL)
    plain = " ".join(plain.split())
    hits = ((re.search(rf"\b(?:{word})\b", plain, re.IGNORECASE), better) for word, better in PROSE.items())
    return {hit[0]: better for hit, better in hits if hit}


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_prose_has_the_fields_words(path: Path) -> None:
    assert own_words(path.read_text(encoding="utf-8")) == {}


def test_the_test_of_prose_sees_them() -> None:
    text = "The run goes\non. `films/1.png` [a film](film.md)\n```\ndealt\n```\nno room for it"
    assert own_words(text) == {"film": "X-ray, image", "goes on": "resumes, continues"}


# What a person reads: help, errors, logs, pages

KEPT = {
    "cli/run_commands.py": {"films"},  # report-films.html, a file of every run that shows records
    "core/snapshots.py": {"room"},
    "data/synthetic/reports.py": {"film"},  # a caption of the synthetic cohort
    "flare/perimeter.py": {"room"},
}
"""File -> words that stay there."""


CODE = re.compile(r"[\w\]]\(|\$[@\[]")
"""What only code has."""


def spoken(tree: ast.Module) -> Iterator[str]:
    """The texts of a module, docstrings among them, without code in them."""
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and " " in text.strip() and not CODE.search(text.partition("```")[0]):
            yield text


def test_what_a_person_reads_has_the_fields_words() -> None:
    for path, tree in trees().items():
        words = {word: better for text in spoken(tree) for word, better in own_words(text).items()}
        assert words.keys() <= KEPT.get(path, set()), (path, words)


def test_the_test_above_sees_them() -> None:
    tree = ast.parse('"""A film."""\nx = 1\nraise ValueError(f"a film of {x} is lent")\n')
    found = [own_words(text) for text in spoken(tree)]
    assert found == [{"film": "X-ray, image"}] * 2 + [{"lent": "imputed"}]
