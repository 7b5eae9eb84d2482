"""The rooms of the package, and who imports whom, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fedvlp

PACKAGE = Path(fedvlp.__file__).parent
MODULES = {
    ".".join(("fedvlp", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

LAYERS = [
    {"core"},
    {"training", "models", "objectives", "data"},
    {"federation", "methods"},
    {"evaluation"},
    {"run"},
    {"report", "deploy"},
    {"flare"},
    {"cli"},
]
"""From the bottom up; a room may import itself and what is below it."""

BELOW: dict[str, set[str]] = {
    part: {part}.union(*LAYERS[:level]) for level, layer in enumerate(LAYERS) for part in layer
} | {
    "federation": {"federation", "training", "core"},
    "methods": {"methods", "core"},  # towers, objectives, data and the server's trainer are protocols to them
}


def part(module: str) -> str:
    """``fedvlp.core.server_state`` -> ``core``; the package itself -> nothing."""
    return [*module.split("."), ""][1]


@cache
def imports(path: Path) -> tuple[tuple[str, int, bool], ...]:
    """(module, line, lazy) of every import in a file, also inside functions; not those for type checking alone."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path.name}:{child.lineno}: imports are absolute in this project"
                assert child.module is not None
                yield child.module, child.lineno, lazy
                if child.module.startswith("fedvlp"):
                    full = (f"{child.module}.{alias.name}" for alias in child.names)
                    yield from ((name, child.lineno, lazy) for name in full if name in MODULES)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                yield from (found for statement in child.orelse for found in visit(statement, lazy))
            else:
                function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from visit(child, lazy or function)

    return tuple(visit(ast.parse(path.read_text(encoding="utf-8")), False))
