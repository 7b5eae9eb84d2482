"""What is known of mutants: verdicts of earlier runs, how tests run without a mutation, and the accepted survivors."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mutants import ACCEPTED, RESULTS, ROOT, digest, file_of
from mutants.selection import Case, files_for
from mutants.sources import Mutant

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Verdicts:
    """Who killed which mutant, one JSON line each, appended as it becomes known; the last line of a mutant counts.

    A verdict holds as long as the module is the same and so is the text of the killer; that of a survivor, as long as
    all test files of its module are the same. What tests share is not looked at: after a change of it, start afresh.
    """

    def __init__(self, module: str) -> None:
        self.path = RESULTS / f"{module.replace('/', '.')}.jsonl"
        self.source, self.tests = digest([file_of(module)]), digest(files_for(module))
        self.lines: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            entries = map(json.loads, self.path.read_text().splitlines())
            self.lines = {entry["name"]: entry for entry in entries if entry["source"] == self.source}

    def killer(self, mutant: Mutant) -> str | None:
        """The test that is known to kill it; "" for a survivor, None where it must be judged (again)."""
        entry = self.lines.get(mutant.name)
        return entry["killer"] if entry and entry["tests"] == self._tests(entry["killer"]) else None

    def suspect(self, mutant: Mutant) -> str:
        """The test that killed it once, which is worth trying first."""
        return self.lines.get(mutant.name, {}).get("killer", "")

    def add(self, mutant: Mutant, killer: str) -> None:
        entry = {"name": mutant.name, "source": self.source, "tests": self._tests(killer), "killer": killer}
        self.lines[mutant.name] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def _tests(self, killer: str) -> str:
        """A hash of what the verdict rests on."""
        return _text_hash(killer) if "::" in killer else self.tests


def _text_hash(test: str) -> str:
    """Of the source of a test, by its node id; of nothing, if there is no such test any more."""
    file, _, name = test.partition("::")
    function = _functions(ROOT / file).get(name.rpartition("::")[2].partition("[")[0], "")
    return hashlib.sha256(function.encode()).hexdigest()[:16]


@cache
def _functions(path: Path) -> dict[str, str]:
    """All functions of a file by name, as syntax."""
    if not path.is_file():
        return {}
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name: ast.dump(node) for node in nodes if isinstance(node, ast.FunctionDef)}


@dataclass(frozen=True)
class Baseline:
    """The tests of a module as they run without a mutation; ``broken`` ones fail and judge nothing."""

    tests: list[Case]
    broken: list[str]
    collected: frozenset[int]  # lines of the module that run while tests are collected
    modules: list[str]  # that they import from elsewhere


def baseline_of(found: dict[str, Any]) -> Baseline:
    broken = set(found["broken"])
    tests = [
        Case(name, one["seconds"], frozenset(one["lines"]))
        for name, one in found["tests"].items()
        if name not in broken and name.partition("::")[0] not in broken
    ]
    return Baseline(tests, sorted(broken), frozenset(found["collected"]), found["modules"])


def known_baseline(module: str, files: Sequence[Path]) -> dict[str, Any] | None:
    """What :func:`keep_baseline` wrote for the very same module and test files."""
    path = _baseline_file(module, files)
    return json.loads(path.read_text()) if path.exists() else None


def keep_baseline(module: str, files: Sequence[Path], found: dict[str, Any]) -> None:
    path = _baseline_file(module, files)
    path.parent.mkdir(parents=True, exist_ok=True)
    for older in path.parent.glob(f"{module.replace('/', '.')}-*.json"):
        older.unlink()
    path.write_text(json.dumps(found))


def _baseline_file(module: str, files: Sequence[Path]) -> Path:
    return RESULTS / "baselines" / f"{module.replace('/', '.')}-{digest([file_of(module), *files])}.json"


def accepted() -> dict[tuple[str, str, str], str]:
    """The reason why a survivor is no gap, by module and the changed lines before and after."""
    if not ACCEPTED.exists():
        return {}
    content = tomllib.loads(ACCEPTED.read_text(encoding="utf-8"))
    return {(one["module"], one["before"], one["after"]): one["why"] for one in content.get("mutant", ())}


def proposal(mutant: Mutant) -> str:
    """A survivor as an entry of accepted.toml, for a person to give the reason."""
    values = {"module": mutant.module, "before": mutant.before, "after": mutant.after}
    return "\n".join(["[[mutant]]", *(f"{key} = {_literal(value)}" for key, value in values.items()), 'why = ""', ""])


def _literal(text: str) -> str:
    return f"'{text}'" if "'" not in text else f"'''{text}'''"
