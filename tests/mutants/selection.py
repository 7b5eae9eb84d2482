"""Which tests judge a mutant: those of the files that import its module, as far as they execute the changed lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mutants import PACKAGE, TESTS, WHOLE_RUNS, dotted

BUDGET = 20.0
"""Seconds of tests a mutant is worth, beside those of its module's own test file; the slowest are left out first."""


@dataclass(frozen=True)
class Case:
    """A test as it ran without any mutation: the seconds it took, and the lines of the module that it executed."""

    name: str  # pytest's node id
    seconds: float
    lines: frozenset[int]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


def files_for(module: str) -> list[Path]:
    """The test files that import ``module``, its own first, then the most specific (which import the least).

    Where no other than its own does, those that import a module that imports it.
    """
    importing, own = _importing({dotted(module)}), own_files(module)
    if not importing.keys() - set(own):
        users = {path for path in PACKAGE.rglob("*.py") if dotted(module) in _imports(path)}
        importing = _importing({dotted(path.relative_to(PACKAGE).with_suffix("").as_posix()) for path in users})
    rest = sorted(importing.keys() - set(own), key=lambda path: (len(importing[path]), path))
    return [*own, *rest]


def _importing(modules: set[str]) -> dict[Path, frozenset[str]]:
    """Test files that import one of ``modules``, and all that they import."""
    return {path: _imports(path) for path in _test_files() if modules & _imports(path)}


def own_files(module: str) -> list[Path]:
    """The files that stand where the module stands: tests/federation/test_codec.py, test_codec_*.py for
    federation/codec.
    """
    room, _, name = module.rpartition("/")
    return [path for path in _test_files() if path.parent == TESTS / room and _is_of(path.stem, name)]


def _is_of(stem: str, name: str) -> bool:
    return stem == f"test_{name}" or stem.startswith(f"test_{name}_")


def chosen(tests: list[Case], reach: Sequence[int], own: set[str]) -> list[Case]:
    """The tests for a change that ``reach`` concerns: file by file, the ``own`` files first, in each the fast ones."""
    relevant = [test for test in tests if not reach or not test.lines.isdisjoint(reach)]
    mine = [test for test in relevant if test.file in own]
    rest, spent = [], 0.0
    for test in sorted((test for test in relevant if test.file not in own), key=lambda test: test.seconds):
        spent += test.seconds
        if spent <= BUDGET:
            rest.append(test)
    return _by_file(mine) + _by_file(rest)


def _by_file(tests: list[Case]) -> list[Case]:
    """Tests of one file stay together, as they share fixtures; the file with the fastest tests comes first."""
    times: dict[str, list[float]] = {}
    for test in tests:
        times.setdefault(test.file, []).append(test.seconds)
    mean = {file: sum(seconds) / len(seconds) for file, seconds in times.items()}
    return sorted(tests, key=lambda test: (mean[test.file], test.file, test.seconds))


@cache
def _test_files() -> tuple[Path, ...]:
    return tuple(sorted(path for path in TESTS.rglob("test_*.py") if path.stem not in WHOLE_RUNS))


@cache
def _imports(path: Path) -> frozenset[str]:
    """The modules of the package that a file imports, anywhere in it; what a room passes on counts as its module's."""
    return frozenset(_imported(ast.parse(path.read_text(encoding="utf-8"))))


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE.name:
            passed_on = _passed_on(node.module)
            yield node.module
            for alias in node.names:
                yield passed_on.get(alias.name, f"{node.module}.{alias.name}")


@cache
def _passed_on(room: str) -> Mapping[str, str]:
    """The modules that a room's ``__init__`` imports its names from."""
    path = PACKAGE.joinpath(*room.split(".")[1:], "__init__.py")
    if not path.is_file():
        return {}
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: node.module for alias in node.names}
    return found
