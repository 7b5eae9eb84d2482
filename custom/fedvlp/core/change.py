"""How long a change is: L2 norms of what an update moves, measured while its values are proved finite.

Of a model up to ``EXACT_NUMEL`` values squares are summed in float64. Of a larger one in float32 over ``ROW`` values
and in float64 over the rows: one read of both models at the memory's speed, equal to about 5e-8. One thread adds a row
up, so the bits do not depend on how many threads there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedvlp.core.types import CHANGE, GRADIENT, is_statistic

EXACT_NUMEL = 16_000_000
"""Up to this many values a model is small: norms and means are computed in float64 (128 MB)."""

BLOCK = 1 << 15
"""Values that are widened to float64 at a time: they stay in the cache, on one thread."""

ROW = 1 << 8
"""Values of a large model whose squares are summed in float32."""

KINDS = WEIGHTS, STATISTICS, BESIDE = ("weights", "running statistics", "what the server keeps beside the model")
"""What a change is of. Changes are compared within a kind only, since kinds differ in size."""

Norms = dict[str, float]
"""The L2 norm of a change, by kind."""


class Change:
    """Measures one update, each tensor read once, by how far it is from ``reference``."""

    def __init__(self, reference: Mapping[str, Tensor]) -> None:
        self._reference = reference
        self._small = sum(t.numel() for t in reference.values() if t.is_floating_point()) <= EXACT_NUMEL
        self._squares: dict[str, list[float]] = {}

    @torch.no_grad()
    def finite(self, name: str, tensor: Tensor) -> bool:
        """Whether all values of the tensor are finite; notes how far they moved, if they are of one of ``KINDS``."""
        kind = kind_of(name, self._reference)
        if kind is None:
            return is_finite(tensor)
        old = self._reference[name] if kind != BESIDE else torch.zeros((), dtype=tensor.dtype).expand_as(tensor)
        exact = self._small or (tensor.dtype, old.dtype) != (torch.float32, torch.float32)
        squares = _exact_squares(tensor, old) if exact else _fast_squares(tensor, old)
        if not math.isfinite(sum(squares)):
            if not bool(torch.isfinite(tensor).all()):
                return False
            squares = _exact_squares(tensor, old)  # float32 does not hold the squares of these finite values
        self._squares[name] = squares
        return True

    def norms(self) -> Norms:
        """The norms of what was measured; summed in the order of the names, so that the order of tensors is no matter.

        Empty where nothing of the update is of one of ``KINDS``.
        """
        totals: Norms = {}
        for name in sorted(self._squares):
            kind = kind_of(name, self._reference) or ""
            for square in self._squares[name]:
                totals[kind] = totals.get(kind, 0.0) + square
        return {kind: math.sqrt(total) for kind, total in totals.items()}


def change_norms(state: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Norms:
    """The norms of an update whose values are finite."""
    change = Change(reference)
    for name in state:
        change.finite(name, state[name])
    return change.norms()


def update_norm(state: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """L2 norm of the change from ``reference`` to ``state``, over the weights that both have."""
    return change_norms(state, reference).get(WEIGHTS, 0.0)


def kind_of(name: str, reference: Mapping[str, Tensor]) -> str | None:
    """Which of ``KINDS`` a tensor of an update changes; None where it changes none."""
    if name in reference:
        moves = reference[name].is_floating_point()
        return (STATISTICS if is_statistic(name) else WEIGHTS) if moves else None
    return BESIDE if name.startswith((CHANGE, GRADIENT)) else None


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite."""
    # A finite sum proves every value finite in one read; only an infinite sum needs the exact look.
    if not tensor.is_floating_point() or math.isfinite(tensor.sum().item()):
        return True
    return bool(torch.isfinite(tensor).all())


def _exact_squares(new: Tensor, old: Tensor) -> list[float]:
    """Squared lengths of the change, of ``BLOCK`` values each, in float64."""
    pairs = zip(new.reshape(-1).split(BLOCK), old.reshape(-1).split(BLOCK), strict=True)
    return [float((values.double() - before).square().sum()) for values, before in pairs]


def _fast_squares(new: Tensor, old: Tensor) -> list[float]:
    """Squared lengths of the change, of ``ROW`` x ``BLOCK`` values each, in float32 within a row."""
    squares = []
    for values, before in zip(_rows(new), _rows(old), strict=True):
        # Distances of single rows, [n, 1, ROW] with [n, 1, ROW]: a difference and its norm in one read of each.
        lengths = torch.cdist(values, before, compute_mode="donot_use_mm_for_euclid_dist").reshape(-1)
        squares += [float(some.double().square().sum()) for some in lengths.split(BLOCK)]
    return squares


def _rows(tensor: Tensor) -> list[Tensor]:
    """The values as [n, 1, ROW], and those that fill no row as [1, 1, rest]; either only where there are such."""
    flat = tensor.reshape(-1)
    whole = flat.numel() // ROW * ROW
    rows = (flat[:whole].view(-1, 1, ROW), flat[whole:].view(1, 1, -1))
    return [some for some in rows if some.numel()]
