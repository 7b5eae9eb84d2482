"""A claim, the scenario in which it can show, and what paired seeds say of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder

HOLDS, FAILS, UNDECIDED = "holds", "fails", "undecided"

Figures = dict[str, float]
"""Name -> figure of one finished run."""


class Table:
    """The figures of all cells: method -> seed -> name -> figure."""

    def __init__(self, cells: Mapping[tuple[str, int], Figures]) -> None:
        self.cells = cells
        self.seeds = sorted({seed for _, seed in cells})

    def values(self, method: str, figure: str) -> list[float]:
        """The figure of a method by seed, in the order of ``seeds``. Raises ValueError where a run has none."""
        missing = [seed for seed in self.seeds if figure not in self.cells.get((method, seed), {})]
        if missing:
            raise ValueError(
                f"claims: no figure {figure} of {method} with seed {missing[0]}; its run did not measure it"
            )
        return [self.cells[method, seed][figure] for seed in self.seeds]

    def has(self, method: str, figure: str) -> bool:
        """Whether the runs of a method measure the figure: one without a selector has none of what it tells."""
        return any(figure in figures for (name, _), figures in self.cells.items() if name == method)

    def difference(self, method: str, other: str, figure: str, other_figure: str = "") -> list[float]:
        """``method`` minus ``other``, seed by seed; of the other, ``other_figure`` where one is given."""
        theirs = self.values(other, other_figure or figure)
        return [a - b for a, b in zip(self.values(method, figure), theirs, strict=True)]


@dataclass(frozen=True)
class Precondition:
    """What must be so before a scenario can rank methods."""

    text: str
    check: Callable[[Table], bool]


@dataclass(frozen=True)
class Claim:
    """``method`` is better than ``other`` in ``figure``: what a paper says, and its own difference."""

    paper: str
    text: str
    method: str
    other: str
    figure: str
    papers_value: str  # as printed, in the paper's own unit
    other_figure: str = ""  # of ``other``, where one run has both; "": the same figure


@dataclass(frozen=True)
class Scenario:
    """A cohort, a start and terms under which claims can show (docs/claims.md)."""

    name: str
    text: str
    experiments: Callable[[int], Mapping[str, Experiment]]  # seed -> method -> experiment
    figures: Callable[[RunFolder], Figures]
    preconditions: tuple[Precondition, ...]
    claims: tuple[Claim, ...]
    shown: tuple[str, ...]  # names of the figures in its table


@dataclass(frozen=True)
class Interval:
    """A paired difference over seeds, with its 95 % interval (Student's t); one seed has none (nan)."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """``HOLDS`` or ``FAILS`` where the interval excludes 0, else ``UNDECIDED``."""
        return HOLDS if self.low > 0 else FAILS if self.high < 0 else UNDECIDED

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def interval(differences: Sequence[float]) -> Interval:
    """Mean and 95 % interval of paired differences, one a seed. Raises ValueError where there are none."""
    if not differences:
        raise ValueError("claims: no seed, so no difference")
    mean = fmean(differences)
    if len(differences) < 2:
        return Interval(mean, math.nan, math.nan)
    from scipy.stats import t

    reach = float(t.ppf(0.975, len(differences) - 1)) * stdev(differences) / math.sqrt(len(differences))
    return Interval(mean, mean - reach, mean + reach)


def ahead(method: str, other: str, figure: str) -> Precondition:
    """``method`` is ahead by more than one standard error of the paired difference."""

    def check(table: Table) -> bool:
        differences = table.difference(method, other, figure)
        error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
        return fmean(differences) > error

    return Precondition(f"{method} is ahead of {other} in {figure} by more than a standard error", check)


def apart(method: str, high: str, low: str, points: float) -> Precondition:
    """Of one method, the figure ``high`` is above ``low`` by at least so many points."""

    def check(table: Table) -> bool:
        return fmean(table.values(method, high)) - fmean(table.values(method, low)) >= points

    return Precondition(f"under {method}, {high} is at least {points:g} above {low}", check)


def above(method: str, high: str, low: str) -> Precondition:
    """Of one method, the mean of the figure ``high`` is above that of ``low``."""

    def check(table: Table) -> bool:
        return fmean(table.values(method, high)) > fmean(table.values(method, low))

    return Precondition(f"under {method}, {high} is above {low}", check)


def apart_methods(method: str, other: str, figure: str, points: float) -> Precondition:
    """``method`` is above ``other`` by at least so many points."""

    def check(table: Table) -> bool:
        return fmean(table.difference(method, other, figure)) >= points

    return Precondition(f"{method} is at least {points:g} above {other} in {figure}", check)


def at_least(method: str, figure: str, least: float) -> Precondition:
    """The mean of a figure reaches ``least``."""

    def check(table: Table) -> bool:
        return fmean(table.values(method, figure)) >= least

    return Precondition(f"{method} reaches {least:g} in {figure}", check)
