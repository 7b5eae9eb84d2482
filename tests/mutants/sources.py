"""The mutants of a module: where it is changed, what is left alone, and which of its lines a change concerns."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import parso
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code

from mutants import DRAWINGS, RESULTS, TUNING, digest, file_of
from mutants.operators import operators

RULES = (Path(__file__), Path(__file__).with_name("operators.py"))
"""What decides, beside the module, which mutants there are."""

Position = tuple[int, int]
"""Line, counted from 1, and column."""

Span = tuple[Position, Position]
Compound = (ast.If, ast.For, ast.While, ast.With)
Definition = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutant:
    """One change: of ``removed`` lines from ``line`` on, which become the ``inserted`` ones."""

    module: str
    operator: str
    occurrence: int
    line: int
    removed: tuple[str, ...]
    inserted: tuple[str, ...]
    reach: tuple[int, ...]  # the lines of which one must run for the change to matter; none: it acts on import

    @property
    def name(self) -> str:
        return f"{self.module} {self.operator} {self.occurrence}"

    @property
    def key(self) -> tuple[str, str, str]:
        """What stays the same while other lines change."""
        return self.module, self.before, self.after

    @property
    def before(self) -> str:
        """The changed lines as they were, in one."""
        return " ".join(line.strip() for line in self.removed).strip()

    @property
    def after(self) -> str:
        return " ".join(line.strip() for line in self.inserted).strip()

    def source(self) -> str:
        """The whole module with this change."""
        lines = file_of(self.module).read_text(encoding="utf-8").split("\n")
        first = self.line - 1
        return "\n".join([*lines[:first], *self.inserted, *lines[first + len(self.removed) :]])


def mutants_of(module: str) -> list[Mutant]:
    """All mutants of a module in the order of its lines, kept on disk, as to find them takes seconds."""
    path = RESULTS / "mutants" / f"{module.replace('/', '.')}-{digest([file_of(module), *RULES])}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        for older in path.parent.glob(f"{module.replace('/', '.')}-*.json"):
            older.unlink()
        path.write_text(json.dumps([asdict(mutant) for mutant in _find(module)]))
    found = json.loads(path.read_text())
    return [Mutant(**{k: tuple(v) if isinstance(v, list) else v for k, v in one.items()}) for one in found]


def _find(module: str) -> list[Mutant]:
    """Those that do not compile, change nothing or are the same as another are left out."""
    source = file_of(module).read_text(encoding="utf-8")
    tree = ast.parse(source)
    skipped = list(_skipped(tree))
    seen, found = {ast.dump(tree)}, []
    for name, operator in operators().items():
        nodes = ast_nodes(parso.parse(source))
        positions = [position for node in nodes for position in operator.mutation_positions(node)]
        for occurrence, (start, _) in enumerate(positions):
            if any(begin <= start < end for begin, end in skipped):
                continue
            changed = mutate_code(source, operator, occurrence)
            meaning = _meaning(changed)
            if changed is None or meaning is None or meaning in seen:
                continue
            seen.add(meaning)
            found.append(Mutant(module, name, occurrence, *_edit(source, changed), _reach(tree, start)))
    return sorted(found, key=lambda mutant: (mutant.line, mutant.operator, mutant.occurrence))


def _meaning(source: str | None) -> str | None:
    """The syntax tree, which layout does not change; None for what does not compile."""
    try:
        compile(source or "", "mutant", "exec")
        return ast.dump(ast.parse(source or ""))
    except (SyntaxError, ValueError):
        return None


def _edit(source: str, changed: str) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """The number of the first changed line, and the changed lines before and after."""
    old, new = source.split("\n"), changed.split("\n")
    first, last = 0, 0
    while first < min(len(old), len(new)) and old[first] == new[first]:
        first += 1
    while last < min(len(old), len(new)) - first - 1 and old[-1 - last] == new[-1 - last]:
        last += 1
    return first + 1, tuple(old[first : len(old) - last]), tuple(new[first : len(new) - last])


def _skipped(tree: ast.Module) -> Iterator[Span]:
    """What says something and does nothing: annotations, protocols, messages, imports for the type checker, defaults.

    The defaults of a configuration are pinned by the committed jobs.
    """
    for node in ast.walk(tree):
        if isinstance(node, (ast.JoinedStr, ast.Raise)) or _is_aside(node):
            yield _span(node)
        elif isinstance(node, Definition):
            arguments = [
                *node.args.posonlyargs,
                *node.args.args,
                *node.args.kwonlyargs,
                node.args.vararg,
                node.args.kwarg,
            ]
            yield from (_span(one.annotation) for one in arguments if one is not None and one.annotation is not None)
            yield from (_span(one) for one in [node.returns] if one is not None)
            if node.name in DRAWINGS:
                yield _span(node)
            if (node.args.kwonlyargs or node.args.posonlyargs) and node.body:  # a lone * or / is no operation
                yield (node.lineno, node.col_offset), _position(node.body[0])
        elif isinstance(node, ast.ClassDef):
            defaults = [one.value for one in node.body if isinstance(one, ast.AnnAssign) and one.value is not None]
            yield from map(_span, defaults)
        elif isinstance(node, ast.AnnAssign):
            yield _span(node.annotation)
        elif isinstance(node, ast.Call):
            yield from _messages(node)


def _is_aside(node: ast.AST) -> bool:
    if isinstance(node, ast.ClassDef):
        return any(ast.unparse(base).endswith("Protocol") for base in node.bases)
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) in TUNING
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _messages(call: ast.Call) -> Iterator[Span]:
    """Texts of a guard, log calls, and the ``strict=`` and ``frozen=`` that guard against a bug of the programmer."""
    name = ast.unparse(call.func)
    if name.startswith(("logger.", "_log.", "self.log_")):
        yield _span(call)
    if name == "require":
        yield from map(_span, call.args[1:])
    yield from (_span(one) for one in call.keywords if one.arg in ("strict", "frozen"))


def _reach(tree: ast.Module, position: Position) -> tuple[int, ...]:
    """The lines of the innermost statement around ``position``, of a compound one those before its body."""
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _holds(node, position)]
    innermost = around[-1]  # ast.walk goes from the outside in
    inside = any(isinstance(node, Definition) for node in around[:-1])
    if isinstance(innermost, Definition) and position[0] < innermost.lineno:  # a decorator
        return ()
    if isinstance(innermost, Definition):  # a default
        return tuple(range(innermost.body[0].lineno, _last(innermost) + 1))
    if not inside:
        return ()
    if isinstance(innermost, Compound):
        return tuple(range(innermost.lineno, max(innermost.lineno + 1, innermost.body[0].lineno)))
    return tuple(range(innermost.lineno, _last(innermost) + 1))


def _holds(node: ast.stmt, position: Position) -> bool:
    first: Sequence[ast.expr] = getattr(node, "decorator_list", ())
    begin = min([_position(node), *(_position(one) for one in first)])
    return begin <= (position[0], position[1] + bool(first)) and position < (_last(node), node.end_col_offset or 0)


def _position(node: ast.stmt | ast.expr) -> Position:
    return node.lineno, node.col_offset


def _last(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _span(node: ast.stmt | ast.expr | ast.keyword) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0)
