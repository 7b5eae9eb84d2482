"""A claim, the scenario in which it can show, and what paired seeds say of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from fedvlp.evaluation.intervals import Interval
from fedvlp.run.cells import Cells
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from studies.claims.cell_results import Figures, Table, on_device

HOLDS, FAILS, UNDECIDED = "holds", "fails", "undecided"


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


def p_value(differences: Sequence[float]) -> float | None:
    """Two-sided, of paired differences (Student's t over seeds); None for one seed."""
    if len(differences) < 2:
        return None
    mean, error = fmean(differences), stdev(differences) / math.sqrt(len(differences))
    if not error:  # they agree to the last digit
        return 0.0 if mean else 1.0
    from scipy.stats import t

    return 2 * float(t.sf(abs(mean) / error, len(differences) - 1))


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


def cells_of(scenario: Scenario, methods: Sequence[str], seeds: Sequence[int], device: str = "") -> Cells:
    """The experiments of the cells, each named as its method; on ``device`` (``training.device``) if one is named."""
    cells = {
        (method, seed): replace(scenario.experiments(seed)[method], name=method) for seed in seeds for method in methods
    }
    return {cell: on_device(one, device) for cell, one in cells.items()} if device else cells


def methods_of(scenario: Scenario, papers: Sequence[str]) -> list[str]:
    """The methods that the claims of these papers, and what must be so before, are about: all of the scenario's."""
    known: Mapping[str, Experiment] = scenario.experiments(0)
    return list(known) if any(claim.paper in papers for claim in scenario.claims) else []
