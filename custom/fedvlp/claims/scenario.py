"""A claim, the scenario in which it can show, and what paired seeds say of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

from fedvlp.evaluation.intervals import Interval
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder

HOLDS, FAILS, UNDECIDED = "holds", "fails", "undecided"

Figures = dict[str, float]
"""Name -> figure of one finished run."""


class NotRunError(ValueError):
    """A cell that was asked for has not been run."""


@dataclass(frozen=True)
class Origin:
    """Where the figures of a cell are from that were taken from a file (claims/results.py)."""

    processor: str  # name of the CPU that ran it
    this_code: bool  # whether that fedvlp had the same code as this one


class Table:
    """The figures of the cells that are finished: (method, seed) -> name -> figure."""

    def __init__(
        self, cells: Mapping[tuple[str, int], Figures], origins: Mapping[tuple[str, int], Origin] | None = None
    ) -> None:
        """``origins``: of the cells that were taken from files."""
        self.cells = cells
        self.origins = origins or {}
        self.seeds = sorted({seed for _, seed in cells})

    def seeds_of(self, *methods: str) -> list[int]:
        """The seeds with which all of these methods have finished, at least one. Raises NotRunError."""
        seeds = [seed for seed in self.seeds if all((method, seed) in self.cells for method in methods)]
        if not seeds:
            raise NotRunError(f"claims: no seed with which {' and '.join(methods)} have finished; run them first")
        return seeds

    def values(self, method: str, figure: str) -> list[float]:
        """The figure of a method by seed. Raises NotRunError, and ValueError where a run has no such figure."""
        return [self._value(method, seed, figure) for seed in self.seeds_of(method)]

    def has(self, method: str, figure: str) -> bool:
        """Whether the runs of a method measure the figure: one without a selector has none of what it tells."""
        return any(figure in figures for (name, _), figures in self.cells.items() if name == method)

    def difference(self, method: str, other: str, figure: str, other_figure: str = "") -> list[float]:
        """``method`` minus ``other``, with every seed that both have. Raises as :meth:`values`.

        Of the other, ``other_figure`` where one is given.
        """
        theirs = other_figure or figure
        seeds = self.seeds_of(method, other)
        return [self._value(method, seed, figure) - self._value(other, seed, theirs) for seed in seeds]

    def _value(self, method: str, seed: int, figure: str) -> float:
        if figure not in self.cells[method, seed]:
            raise ValueError(f"claims: no figure {figure} of {method} with seed {seed}; its run did not measure it")
        return self.cells[method, seed][figure]


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
    runs: str = ""  # folder of its runs, for scenarios that measure the same runs; "": its name


def verdict(measured: Interval) -> str:
    """``HOLDS`` or ``FAILS`` where the interval excludes 0, else ``UNDECIDED``; so one seed decides nothing."""
    return {1: HOLDS, -1: FAILS}.get(measured.side, UNDECIDED)


def ahead(method: str, other: str, figure: str, other_figure: str = "") -> Precondition:
    """``method`` is ahead of the other, or of its ``other_figure``, by more than a standard error of the difference."""

    def check(table: Table) -> bool:
        differences = table.difference(method, other, figure, other_figure)
        error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
        return fmean(differences) > error

    theirs = f"{other_figure} of {other}" if other_figure else other
    return Precondition(f"{method} is ahead of {theirs} in {figure} by more than a standard error", check)


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


def at_most(method: str, figure: str, most: float) -> Precondition:
    """The mean of a figure does not exceed ``most``."""

    def check(table: Table) -> bool:
        return fmean(table.values(method, figure)) <= most

    return Precondition(f"{method} does not exceed {most:g} in {figure}", check)
