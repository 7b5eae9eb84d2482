"""Presets with several seeds and settings: which cells there are, and the table of what they reach."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedvlp.core.checkpoint import save_text
from fedvlp.data.cohort import digest
from fedvlp.data.deid import Accepted
from fedvlp.evaluation import metric_names as names
from fedvlp.evaluation.intervals import over_seeds
from fedvlp.run.cells import DONE, OTHER_CODE, Cell, Figures, Said, measured
from fedvlp.run.config import fields_of, override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import of_server, summary

OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")
"""The commas between the values of ``--grid``; those of a list are its own."""

SCOPES = (names.IN_BATCH, names.WHOLE_SET)


@dataclass(frozen=True)
class Column:
    """A figure that the table shows."""

    title: str
    figure: str
    factor: float = 1.0  # what the figure is multiplied by: AUCs are 0..1, and shown in percent


def columns_of(split: str) -> tuple[Column, ...]:
    """Every figure that a table can show of a held-out split; those show that some cell has."""
    kinds = ((names.AVERAGE, "average"), (names.WORST, "worst site"))
    recalls = [
        Column(f"R@{k} {title}{where}", names.over_sites(names.recall(split, k, scope), kind))
        for scope, where in zip(SCOPES, (" (batches of 32)", " (whole set)"), strict=True)
        for k in (1, 5)
        for kind, title in kinds
    ]
    own = [Column(f"server R@{k}", of_server(names.recall(split, k, names.WHOLE_SET))) for k in (1, 5, 10)]
    return (*recalls, *own, Column("server macro AUC", of_server(names.auc(split, names.MACRO)), 100.0))


def grid_of(given: Sequence[str]) -> dict[str, list[str]]:
    """Setting -> values, of "method.rho=0,0.1,1" each. Raises ValueError for another form or a setting given twice."""
    grid: dict[str, list[str]] = {}
    for one in given:
        key, equals, values = one.partition("=")
        if not (key and equals and values):
            raise ValueError(f"--grid {one!r} is not SETTING=VALUE,VALUE; write --grid method.rho=0,0.1,1")
        if key in grid:
            raise ValueError(f"--grid has {key} twice; give all its values at once, separated by commas")
        grid[key] = OUTSIDE_BRACKETS.split(values)
    return grid


SEEDS = ("rounds.seed", "data.seed")
"""Settings that :func:`seeded` sets in every cell, beside the name."""


def refuse_own(settings: Iterable[str]) -> None:
    """Raises ValueError for a setting that a sweep sets itself: it would be said in the table, and not be so."""
    for setting in settings:
        if setting in SEEDS:
            raise ValueError(f"sweep: {setting} is set; the seeds are those of --seeds, so leave it out")
        if setting == "name":
            raise ValueError("sweep: name is set; a variant has the name of its preset and settings, so leave it out")


def variants(experiments: Mapping[str, Experiment], grid: Mapping[str, Sequence[str]]) -> dict[str, Experiment]:
    """Name -> experiment: each preset with every combination of those settings of ``grid`` that it has.

    A preset without a setting is there once for all its values: FedAvg beside FedDRA with several rho. Raises
    ValueError for a setting that no preset has, and a value that does not fit.
    """
    for key, values in grid.items():
        if not any(_has(one, key) for one in experiments.values()):
            override(next(iter(experiments.values())), key, values[0])  # raises, and names the nearest setting
    made: dict[str, Experiment] = {}
    for name, experiment in experiments.items():
        own = [key for key in grid if _has(experiment, key)]
        for combination in itertools.product(*(grid[key] for key in own)):
            changed = experiment
            for key, value in zip(own, combination, strict=True):
                changed = override(changed, key, value)
            made[" ".join([name, *(f"{key}={value}" for key, value in zip(own, combination, strict=True))])] = changed
    return made


def _has(experiment: Experiment, key: str) -> bool:
    """Whether there is such a setting, whatever values it takes."""
    group: Any = experiment
    for name in key.split("."):
        if not is_dataclass(group) or name not in fields_of(group):
            return False
        group = getattr(group, name)
    return True


@dataclass(frozen=True)
class Table:
    """The figures of the cells that are finished."""

    cells: Mapping[Cell, Figures]  # variant and seed -> name -> figure
    before: Mapping[Cell, str] = field(default_factory=dict)  # of those that were not run now, how they were found

    def origin(self) -> str:
        """One sentence: how many cells there are, and which of them were not run now, or not with this code."""
        said = f"{len(self.cells)} cells; {len(self.before)} of them had finished before"
        other = list(self.before.values()).count(OTHER_CODE)
        return said + (f"; {other} were run by a fedvlp with other code" if other else "") + "."


def swept(
    every: Mapping[str, Experiment],
    seeds: Sequence[int],
    runs: Path,
    jobs: int,
    said: Said,
    accept_phi_risk: Accepted = False,
) -> Table:
    """Runs or resumes every variant with every seed, as ``cells.measured``; the table has the variants' names.

    The seed is that of the run, and of its data where they are drawn or split by one: variants with one seed have the
    same records and splits.
    """
    name_of = {title: name_for_folder(title) for title in every}
    title_of = {name: title for title, name in name_of.items()}
    cells = {(name_of[title], seed): seeded(every[title], name_of[title], seed) for seed in seeds for title in every}
    before: dict[Cell, str] = {}

    def said_of(name: str, seed: int, what: str) -> None:
        if what != DONE:
            before[title_of[name], seed] = what
        said(title_of[name], seed, what)

    finished = measured(reached, cells, runs / "cells", jobs, said_of, accept_phi_risk)
    return Table({(title_of[name], seed): figures for (name, seed), figures in finished.items()}, before)


def name_for_folder(title: str) -> str:
    """Lower-case letters, digits and dashes, at most 64, and the beginning of a digest where ``title`` has others."""
    name = re.sub(r"[^a-z0-9]", "-", title.lower())
    return name if name == title and len(name) <= 64 else f"{name[:55]}-{digest(title)[:8]}"


def seeded(experiment: Experiment, name: str, seed: int) -> Experiment:
    """The experiment with this name and seed."""
    data: Any = experiment.data
    if hasattr(data, "seed"):
        data = replace(data, seed=seed)
    return replace(experiment, name=name, data=data, rounds=replace(experiment.rounds, seed=seed))


def reached(folder: RunFolder) -> Figures:
    """What the trained model of a finished run reaches on held-out records."""
    trained = summary(folder.history()).get("trained", {})
    return {name: round(value, 4) for name, value in trained.items() if math.isfinite(value)}


def shown(table: Table) -> list[Column]:
    """The columns of which some cell has the figure: of test records, or of validation records where none has those."""
    for split in ("test", "val"):
        every = [one for one in columns_of(split) if any(one.figure in figures for figures in table.cells.values())]
        in_batch = [one for one in every if not one.title.endswith("(whole set)")]
        recalls = [one for one in in_batch if one.title.startswith("R@")]
        if every:
            return in_batch if recalls else every
    return []


def as_rows(table: Table) -> tuple[list[str], list[list[str]]]:
    """Heading and rows: a variant's mean (SD) over its seeds, and the paired difference from the first variant.

    A difference has its 95 % interval (Student's t) where two seeds or more have both.
    """
    columns, methods = shown(table), list(dict.fromkeys(method for method, _ in table.cells))
    heading = ["variant", "seeds"]
    for column in columns:
        heading += [column.title, f"minus {methods[0]}"]
    rows = []
    for method in methods:
        row = [method, str(sum(of == method for of, _ in table.cells))]
        for column in columns:
            row += [_mean(table, method, column), _ahead(table, method, methods[0], column)]
        rows.append(row)
    return heading, rows


def _values(table: Table, method: str, column: Column) -> dict[int, float]:
    """Seed -> figure, of the cells of a variant that have it."""
    return {
        seed: column.factor * figures[column.figure]
        for (of, seed), figures in table.cells.items()
        if of == method and column.figure in figures
    }


def _mean(table: Table, method: str, column: Column) -> str:
    values = list(_values(table, method, column).values())
    if not values:
        return ""
    return f"{fmean(values):.2f}" + (f" ({stdev(values):.2f})" if len(values) > 1 else "")


def _ahead(table: Table, method: str, first: str, column: Column) -> str:
    ours, theirs = _values(table, method, column), _values(table, first, column)
    both = sorted(ours.keys() & theirs.keys())
    return str(over_seeds([ours[seed] - theirs[seed] for seed in both])) if both and method != first else ""


def write(table: Table, folder: Path) -> list[Path]:
    """Writes ``sweep.md``, the table, and ``cells.csv``, a line for each cell with every figure that it has.

    Below the table stands which cells were not run now, or not with this code.
    """
    heading, rows = as_rows(table)
    lines = [heading, ["---"] * len(heading), *rows]
    every = sorted({name for figures in table.cells.values() for name in figures})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["variant", "seed", *every])
    for (method, seed), figures in table.cells.items():
        writer.writerow([method, seed, *(figures.get(name, "") for name in every)])
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        folder / "sweep.md": "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{table.origin()}\n",
        folder / "cells.csv": text.getvalue(),
    }
    for file, content in files.items():
        save_text(file, content)
    return list(files)
