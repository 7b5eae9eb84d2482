"""Averages of states that a minority of sites cannot spoil, value by value: the trimmed mean and the median.

Yin et al., 2018, Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates,
https://arxiv.org/abs/1803.01498, definitions 1 (median) and 2 (trimmed mean).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fedvlp.core.aggregation import StreamingMean
from fedvlp.core.tensor_file import Spool
from fedvlp.core.types import State
from fedvlp.core.validate import require

MEAN, TRIMMED, MEDIAN = AVERAGES = ("mean", "trimmed", "median")

VALUES = 1 << 15
"""Values of one tensor that are sorted at a time, each over all sites."""

ROUNDING = 1e-9
"""0.29 of 100 sites are 29: the product as a float is a little less."""


class Mean(Protocol):
    """Folds states into one, each with its weight."""

    def add(self, state: Mapping[str, Tensor], weight: float) -> None: ...

    def result(self) -> State: ...


@dataclass(frozen=True)
class Averaging:
    """How several states become one: ``kind`` is mean, trimmed or median; ``trim`` is that of the trimmed mean.

    States that must wait for the others do so in the folder ``spool``, if they are large. Raises ValueError for values
    outside of their range.
    """

    kind: str = MEAN
    trim: float = 0.2  # share of the sites whose values are left out at each end, 0 to below 0.5; 0 is the mean
    spool: Path | None = None

    def __post_init__(self) -> None:
        require(self.kind in AVERAGES, f"averaging is {self.kind!r}; choose one of {', '.join(AVERAGES)}")
        require(0 <= self.trim < 0.5, f"trim is {self.trim}; the share that is left out at each end is below a half")

    @property
    def robust(self) -> bool:
        """Whether it is another average than the mean; so it is not where nothing is trimmed."""
        return self.kind == MEDIAN or (self.kind == TRIMMED and self.trim > 0)

    def begin(self, reference: State, expected_weight: float = 1.0, spare: State | None = None) -> Mean:
        """An empty average of tensors as in ``reference``; the other arguments are those of ``StreamingMean``."""
        if not self.robust:
            return StreamingMean(reference, expected_weight, spare)
        return SortedMean(reference, 0.5 if self.kind == MEDIAN else self.trim, self.spool)


class SortedMean:
    """The mean of what is left of every value's sorted list when its ends are cut off, in float64.

    Of n sites with a weight above 0, floor(``trim`` n) are left out at each end: at least one, as long as one or two
    are left. A weight buys no place in the list, so what n_k a site claims does not decide whose values are left out.
    As long as no more sites send nonsense than are left out at one end, every value of the result lies between honest
    ones.

    Trimmed mean: those that are left count by their weights, so that trimming nothing is FedAvg's mean. Differs from
    definition 2, which has no weights: with equal ones it is the same.
    Median (``trim`` 0.5): the value in the middle, or half the sum of the two; weights above 0 do not matter.
    """

    def __init__(self, reference: State, trim: float, spool: Path | None = None) -> None:
        self._reference = {name: t for name, t in reference.items() if t.is_floating_point()}
        self._trim = trim
        self._spool = Spool(spool)
        self._states: list[Callable[[str], Tensor]] = []
        self._weights: list[float] = []

    @torch.no_grad()
    def add(self, state: Mapping[str, Tensor], weight: float) -> None:
        """Keeps a copy of ``state`` until all have come; a weight of 0 adds nothing."""
        if weight == 0:
            return
        self._states.append(self._spool.put({name: state[name].detach() for name in self._reference}))
        self._weights.append(weight)

    @torch.no_grad()
    def result(self) -> State:
        """The average, in the dtypes of the reference; empty when nothing was added (keep what you have)."""
        if not self._states:
            return {}
        return {name: self._of(name, like) for name, like in self._reference.items()}

    def _of(self, name: str, like: Tensor) -> Tensor:
        """One tensor of the result. Of one tensor at a time the values of all sites are in memory."""
        result = torch.empty(like.shape, dtype=like.dtype)
        chunks = [state(name).reshape(-1).split(VALUES) for state in self._states]
        for values, *sites in zip(result.reshape(-1).split(VALUES), *chunks, strict=True):
            values.copy_(self._middle(torch.stack([chunk.double() for chunk in sites])))  # [n, values]
        return result

    def _middle(self, values: Tensor) -> Tensor:
        """[n, v] float64, one row a site, to [v]."""
        count = len(values)
        cut = left_out(count, self._trim)
        ordered, sites = values.sort(dim=0, stable=True)
        middle = ordered[cut : count - cut]
        if self._trim == 0.5:
            return middle.mean(dim=0)
        weights = torch.tensor(self._weights, dtype=torch.float64)[sites[cut : count - cut]]
        return (middle * weights).sum(dim=0) / weights.sum(dim=0)


def left_out(count: int, trim: float) -> int:
    """How many of ``count`` sites are left out at each end."""
    return min(max(1, math.floor(trim * count + ROUNDING)), (count - 1) // 2)
