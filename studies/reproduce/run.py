"""Runs or resumes the cells of a table, and estimates what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedvlp.data.deid import Accepted
from fedvlp.evaluation.intervals import Interval, over_seeds
from fedvlp.run.assembly import Assembly
from fedvlp.run.cells import Said
from fedvlp.run.experiment import Experiment
from studies.claims.cell_results import CellResults, Table, measured
from studies.claims.ledger import SCENARIOS
from studies.claims.page import Outcome, judge
from studies.claims.scenario import Claim, Scenario, cells_of
from studies.reproduce.measures import spread
from studies.reproduce.table import DEMO, Entry, Size

ROUGHLY = "a rough guess: 0.6 s of processor for a step of the tiny towers, as 100 steps took once on one slow core"
SECONDS = {
    ("alignment", DEMO): 360.0,
    ("alignment-heads", DEMO): 420.0,
    ("alignment-elsewhere", DEMO): 380.0,
    ("retina", DEMO): 200.0,
    ("distortion", DEMO): 480.0,
    ("shallow", DEMO): 480.0,
    ("representations", DEMO): 120.0,
    ("representations-answers", DEMO): 150.0,
    ("unlike-sites", DEMO): 300.0,
    ("unlike-sites-external", DEMO): 300.0,
    ("missing-modalities", DEMO): 180.0,
}
"""Of a cell where no cell of its study has finished: steps times 0.6, and as much again for evaluations and heads."""


def scenario(entry: Entry, size: Size) -> Scenario:
    """What claims/cells.py runs for an entry. It has no preconditions: those of the ledger need the ledger's sizes."""
    study = entry.study
    assert study is not None
    return Scenario(
        f"{study.name}-{size.label}",
        entry.title,
        lambda seed: study.experiments(size, seed),
        study.figures(size),
        (),
        claims_of(entry),
        (),
        runs=f"{study.runs}-{size.label}",
    )


def claims_of(entry: Entry) -> tuple[Claim, ...]:
    """The ledger's claims of the paper that are about a figure of the table, of methods that it has, each once."""
    cells, figures = entry.cells(), {column.figure for column in entry.columns} | set(entry.judged)
    claims = (claim for one in SCENARIOS.values() for claim in one.claims)
    mine = [
        one
        for one in claims
        if one.paper == entry.paper and one.figure in figures and {one.method, one.other} <= set(cells)
    ]
    return tuple(dict.fromkeys(mine))


def chosen_rows(entry: Entry, only: Sequence[str]) -> Entry:
    """The entry with those rows and columns alone that are in ``only``, by title or a row's cell; none named: all.

    Raises ValueError for a name of neither.
    """
    rows = tuple(row for row in entry.rows if {row.title, row.cell} & set(only))
    columns = tuple(column for column in entry.columns if column.title in only)
    known = {name for row in rows for name in (row.title, row.cell)} | {column.title for column in columns}
    if strange := [name for name in only if name not in known]:
        titles, headings = (", ".join(f"{one.title!r}" for one in some) for some in (entry.rows, entry.columns))
        raise ValueError(
            f"reproduce: {entry.key} has no row {', '.join(strange)}; its rows are {titles}, its columns {headings}"
        )
    return replace(entry, rows=rows or entry.rows, columns=columns or entry.columns)


@dataclass(frozen=True)
class Reproduced:
    """An entry after its cells have run."""

    entry: Entry
    size: Size
    table: Table
    outcomes: tuple[Outcome, ...]

    def value(self, row: int, column: int) -> Interval | None:
        """Mean over seeds with its interval; None where the cell did not measure it."""
        values = self.by_seed(row, column)
        return over_seeds(list(values.values())) if values else None

    def by_seed(self, row: int, column: int) -> dict[int, float]:
        """Seed -> value."""
        return self._figure(row, column, self.entry.rows[row].about + self.entry.columns[column].figure)

    def spread(self, row: int, column: int) -> float | None:
        """Standard deviation over the seeds of the prompts, mean over seeds; None where nothing is measured by them."""
        name = spread(self.entry.rows[row].about + self.entry.columns[column].figure)
        values = self._figure(row, column, name)
        return fmean(values.values()) if values else None

    def _figure(self, row: int, column: int, name: str) -> dict[int, float]:
        cell = self.entry.rows[row].cell + self.entry.columns[column].cell
        return {
            seed: figures[name]
            for (of, seed), figures in sorted(self.table.cells.items())
            if of == cell and name in figures
        }


def reproduce(
    entry: Entry,
    size: Size,
    seeds: Sequence[int],
    runs: Path,
    files: Path,
    jobs: int,
    said: Said,
    accept_phi_risk: Accepted = False,
) -> Reproduced:
    """Runs or resumes the cells of an entry that runs; from ``runs`` on: as in :func:`claims.cells.measured`."""
    study = entry.study
    assert study is not None
    entry.refuse(size)
    if study.drawn:
        return Reproduced(entry, size, Table({("cohort", seed): study.drawn(size, seed) for seed in seeds}), ())
    one = scenario(entry, size)
    table = measured(one, cells_of(one, entry.cells(), seeds), runs, files, jobs, said, accept_phi_risk)
    judged = () if size.quick else one.claims  # no figure counts there
    told = tuple(claim for claim in judged if not table.cells or table.has(claim.method, claim.figure))
    return Reproduced(entry, size, table, judge(replace(one, claims=told), table, [entry.paper]).outcomes)


@dataclass(frozen=True)
class Estimate:
    """What the cells of a table still take. None: nobody knows yet."""

    cells: int
    done: int
    seconds: float | None  # of one process after the other
    from_what: str
    bytes: int  # on the wire, both ways, all sites
    bytes_of: int  # cells that ``bytes`` are of; of the others they are not known before they run


def estimate(entry: Entry, size: Size, seeds: Sequence[int], files: Path) -> Estimate:
    """From finished cells where there are some, else from what was measured before. Runs nothing."""
    study = entry.study
    assert study is not None
    entry.refuse(size)
    if study.drawn:
        return Estimate(0, 0, 0.0, "nothing is trained", 0, 0)
    name = f"{study.name}-{size.label}"
    one = scenario(entry, size)
    cells = cells_of(one, entry.cells(), seeds)
    results = CellResults(files, name)
    wanted = {cell: of for cell, of in cells.items() if not results.load(cell, of, one.figures)}
    filed = results.seconds()
    known = {cell: fmean(spent) for cell, spent in filed.items()}
    default = SECONDS.get((study.name, size.name)) if size.demo else None
    if known:
        mean = fmean(known.values())
        seconds: float | None = sum(known.get(cell, mean) for cell, _ in wanted)
        what = f"{sum(map(len, filed.values()))} finished cells of this study in the folder of results"
    elif default is not None:
        seconds, what = default * len(wanted), ROUGHLY
    else:
        seconds, what = None, "no cell has finished yet"
        if size.quick:
            seconds, what = 5.0 * len(wanted), "a guess of 5 s a cell"
    of_method = {cell: traffic(of) for (cell, _), of in wanted.items()}  # the seed makes no difference
    sent = [count for cell, _ in wanted if (count := of_method[cell]) is not None]
    return Estimate(len(cells), len(cells) - len(wanted), seconds, what, sum(sent), len(sent))


def traffic(experiment: Experiment) -> int | None:
    """Bytes to and from all sites of a whole run: the model down in each phase, what the method shares up.

    None for a method that sends something else (representations, a model's digest), which depends on the records.
    """
    method, rounds = experiment.method, experiment.rounds.rounds
    if method.uses_public or experiment.extra is not None or method.pooled:
        return None
    sizes = {name: 4 * t.numel() for name, t in Assembly(experiment).modules()[0].state_dict().items()}
    data: Any = experiment.data
    sites = getattr(data, "sites", experiment.partition.sites)
    count = len(sites) if isinstance(sites, tuple) else sites
    whole, phases = sum(sizes.values()), method.phases(0)  # every phase begins with the whole model
    up = sum(size for phase in phases for name, size in sizes.items() if method.shares(name, phase))
    evaluated = whole if experiment.rounds.evaluate_every else 0
    return int(count * (rounds * (len(phases) * whole + up) + evaluated))
