"""Runs the cells of a scenario, one run folder each; what was finished is read, what was stopped goes on.

The figures of a finished cell are also in a file (claims/results.py), which outlasts its run.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from fedvlp.claims import results
from fedvlp.claims.scenario import Figures, Origin, Scenario, Table
from fedvlp.run.config import fingerprint
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

DONE, HERE, FILED = "done", "there already", "in the results"
"""What became of a cell: it was run now, its run was finished, or its figures are in a file."""

Said = Callable[[str, int, str], None]
"""Called with method, seed and one of these."""

Cells = dict[tuple[str, int], Experiment]
"""(method, seed) -> its experiment."""


def cells_of(scenario: Scenario, methods: Sequence[str], seeds: Sequence[int]) -> Cells:
    """The experiments of the cells, each named as its method."""
    return {
        (method, seed): replace(scenario.experiments(seed)[method], name=method) for seed in seeds for method in methods
    }


def measured(scenario: Scenario, cells: Cells, root: Path, files: Path, jobs: int, said: Said) -> Table:
    """The figures of the cells: from ``files`` (claims/results.py), from finished runs, or of runs that begin now.

    ``jobs`` cells run at a time; stopped and started again, it goes on. With ``jobs`` 0 nothing is run, and the cells
    that have not finished are not in the table. The runs are in ``<root>/<scenario>/<seed>/<method>/``, and what has
    finished is written to ``files``. Raises what a run raises, after the others have ended.
    """
    figures: dict[tuple[str, int], Figures] = {}
    origins: dict[tuple[str, int], Origin] = {}
    wanted: Cells = {}

    def noted(cell: tuple[str, int], run: RunFolder) -> None:
        figures[cell] = scenario.figures(run)
        results.save(results.path(files, scenario.name, *cell), run, figures[cell])

    for cell, experiment in cells.items():
        filed = results.load(results.path(files, scenario.name, *cell), experiment)
        run = None if filed else finished(_folder(scenario, root, cell), experiment)
        if filed:
            figures[cell], origins[cell] = filed
            said(*cell, FILED)
        elif run:
            noted(cell, run)
            said(*cell, HERE)
        else:
            wanted[cell] = experiment
    if wanted and jobs:
        # fresh interpreters: a process that has run several threads must not be forked
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            running = {pool.submit(train, _folder(scenario, root, cell), one): cell for cell, one in wanted.items()}
            for future in as_completed(running):
                noted(running[future], RunFolder(future.result()))
                said(*running[future], DONE)
    return Table({cell: figures[cell] for cell in cells if cell in figures}, origins)


def _folder(scenario: Scenario, root: Path, cell: tuple[str, int]) -> Path:
    return root / scenario.name / str(cell[1])


def train(root: Path, experiment: Experiment) -> Path:
    """Runs or resumes one cell. Returns the folder of its run."""
    folder = RunFolder.open(root, experiment)
    simulate(experiment, folder)
    return folder.path


def finished(root: Path, experiment: Experiment) -> RunFolder | None:
    """The finished run of this very configuration, if there is one."""
    wanted = fingerprint(experiment.pinned())  # a run's own configuration has the checksum of what it starts from
    for path in sorted((root / experiment.name).glob("[0-9]*")):
        folder = RunFolder(path)
        if folder.model.exists() and fingerprint(folder.experiment()) == wanted:
            return folder
    return None


def methods_of(scenario: Scenario, papers: Sequence[str]) -> list[str]:
    """The methods that the claims of these papers, and what must be so before, are about: all of the scenario's."""
    known: Mapping[str, Experiment] = scenario.experiments(0)
    return list(known) if any(claim.paper in papers for claim in scenario.claims) else []
