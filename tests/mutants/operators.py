"""How one place is changed: a choice of cosmic-ray's operators, and four of the same form that it lacks.

cosmic-ray swaps every operator for every other. Most of those mutants die at once and prove nothing; kept here are the
neighbours that a person could have written by mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import parso
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator

COMPARISONS = (
    "Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Is_IsNot", "IsNot_Is",
)  # fmt: skip
BINARIES = (
    "Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Div", "Mod_FloorDiv", "Pow_Mul", "BitOr_BitAnd",
    "BitAnd_BitOr", "LShift_RShift",
)  # fmt: skip
OTHERS = (
    "ReplaceUnaryOperator_Delete_USub", "ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_Invert",
    "AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "NumberReplacer", "RemoveDecorator", "ZeroIterationForLoop",
    "ExceptionReplacer",
)  # fmt: skip

OPPOSITES = (
    ("eval", "train"), ("min", "max"), ("amin", "amax"), ("argmin", "argmax"), ("minimum", "maximum"), ("mean", "sum"),
    ("any", "all"), ("isnan", "isfinite"), ("detach", "clone"),
)  # fmt: skip
PARTNERS = dict(OPPOSITES) | {other: one for one, other in OPPOSITES}
ASSIGNMENTS = {"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=", "|=": "="}


class SwapCall(Operator):
    """A called function becomes its opposite: ``model.eval()`` -> ``model.train()``, ``min(...)`` -> ``max(...)``."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "name" and node.value in PARTNERS and _is_called(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.value = PARTNERS[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        return ()


class DropCall(Operator):
    """A statement that is a call alone is left out: a guard (``require(...)``), an update in place, a warning."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "simple_stmt" and _is_call(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        first = node.children[0].get_first_leaf()
        node.children[0] = parso.python.tree.Keyword("pass", first.start_pos, first.prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        return ()


class SwapMembership(Operator):
    """``in`` and ``not in`` change places."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        return iter([(operator.start_pos, operator.end_pos) for operator in self._operators(node)])

    def mutate(self, node: Any, index: int) -> Any:
        operator = list(self._operators(node))[index]
        place = node.children.index(operator)
        node.children[place] = parso.parse(" not in" if operator.get_code().strip() == "in" else " in")
        return node

    @staticmethod
    def _operators(node: Any) -> Iterator[Any]:
        if node.type == "comparison":
            for operator in node.children[1::2]:
                if " ".join(operator.get_code().split()) in ("in", "not in"):
                    yield operator

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        return ()


class SwapAssignment(Operator):
    """``x += y`` -> ``x -= y``; ``x |= y`` -> ``x = y``, which forgets what was there."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "operator" and node.value in ASSIGNMENTS:
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.value = ASSIGNMENTS[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        return ()


def _is_called(name: Any) -> bool:
    following, before = name.get_next_leaf(), name.get_previous_leaf()
    return following is not None and following.value == "(" and (before is None or before.value not in ("def", "class"))


def _is_call(node: Any) -> bool:
    if node.type not in ("atom_expr", "power"):
        return False
    last = node.children[-1]
    return last.type == "trailer" and last.children[0].value == "("


def operators() -> dict[str, Operator]:
    """All of them by name."""
    stock = [f"ReplaceComparisonOperator_{name}" for name in COMPARISONS]
    stock += [f"ReplaceBinaryOperator_{name}" for name in BINARIES]
    found = {name: get_operator(f"core/{name}")() for name in (*stock, *OTHERS)}
    return found | {kind.__name__: kind() for kind in (SwapCall, DropCall, SwapMembership, SwapAssignment)}
